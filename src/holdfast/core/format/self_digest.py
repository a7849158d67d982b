"""JSON objects that end with a digest of themselves: manifests, and the notes of a root.

{"holdfast":1,"step":40,...,"digest":"8be1c3a2f0d94e17"}      XXH3-64 of all that is before its comma
"""

from __future__ import annotations

import re

from holdfast.core.codec.digest import hexdigest

SEAL_BYTES = 64
"""Most bytes of a seal, with whitespace."""
_SEAL = re.compile(rb',"digest":"([0-9a-f]{16})"\}\s*\Z')


def with_seal(document: bytes) -> bytes:
    """Return a JSON object with its digest added as the last key."""
    body = document[:-1]
    return body + f',"digest":"{hexdigest(body)}"}}'.encode()


def without_seal(data: bytes) -> tuple[memoryview, str]:
    """Return the bytes before the seal, and the digest that the seal states; "" without a seal."""
    seal = _SEAL.search(data, max(len(data) - SEAL_BYTES, 0))
    return (memoryview(data)[: seal.start()], seal[1].decode()) if seal else (memoryview(b""), "")
