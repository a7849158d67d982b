"""Digests: XXH3-64 of every chunk of a file, in a table at the file's end.

A file is divided into chunks of `CHUNK_BYTES` from byte 0 on, up to the table; the table holds one
little-endian u64 per chunk; the manifest holds the digest of the table.  So any chunk can be verified
by reading that chunk and the (tiny) table, and a flipped bit is found with its range.
XXH3 detects damage, not attacks: a writer of the store can also write its digests.

Manifests, and the notes of a root, are JSON objects that end with a digest of themselves, their seal:

    {"holdfast":1,"step":40,...,"digest":"8be1c3a2f0d94e17"}      of all that is before its comma
"""

from __future__ import annotations

import re
from collections.abc import MutableSequence
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ALGORITHM = "xxh3_64"
CHUNK_BYTES = 256 << 10
MAX_TABLE_BYTES = 1 << 28
"""Most bytes of a digest table, for a file of 8 TiB."""

SEAL_BYTES = 64
"""Most bytes of a seal, with whitespace."""
_SEAL = re.compile(rb',"digest":"([0-9a-f]{16})"\}\s*\Z')


def digest(data: bytes | bytearray | memoryview) -> int:
    """XXH3-64 of some bytes; releases the GIL for large data."""
    return xxhash.xxh3_64_intdigest(data)


def hexdigest(data: bytes | bytearray | memoryview) -> str:
    """`digest` as 16 hex digits, as manifests hold it."""
    return f"{digest(data):016x}"


def num_chunks(data_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Number of chunks that cover `data_bytes`; the last may be shorter."""
    return -(-data_bytes // chunk_bytes)


def digest_chunks(
    data: memoryview,
    into: NDArray[np.uint64] | MutableSequence[int],
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Write the digest of each chunk of `data`, which begins at a chunk, to `into`."""
    for i in range(num_chunks(len(data), chunk_bytes)):
        into[i] = xxhash.xxh3_64_intdigest(data[i * chunk_bytes : (i + 1) * chunk_bytes])


def with_seal(document: bytes) -> bytes:
    """Return a JSON object with its digest added as the last key."""
    body = document[:-1]
    return body + f',"digest":"{hexdigest(body)}"}}'.encode()


def without_seal(data: bytes) -> tuple[memoryview, str]:
    """Return the bytes before the seal, and the digest that the seal states; "" without a seal."""
    seal = _SEAL.search(data, max(len(data) - SEAL_BYTES, 0))
    return (memoryview(data)[: seal.start()], seal[1].decode()) if seal else (memoryview(b""), "")
