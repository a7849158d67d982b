"""Files attached to a step: how they are packed into one object and read from it.

    steps/0000000100/0001-000003/attached.pack     holdfast|config.json|tokenizer.json|digest table

One object holds all files: a save costs one more request, and code that copies, uploads, verifies or
deletes a step treats it as one more image.  The manifest names each file with its place, length and
digest, so a committed step has all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from holdfast.base.errors import Corrupt
from holdfast.core.checkpoint.files import Files
from holdfast.core.codec.digest import digest_chunks, hexdigest, num_chunks
from holdfast.core.format.manifest import PACK_HEAD, AttachedFile, PackEntry

_PACK = "attached.pack"


def make_pack(attempt: str, contents: Mapping[str, bytes]) -> tuple[PackEntry, bytes]:
    """Return the entry of a pack in the folder of an attempt, and its bytes."""
    body = PACK_HEAD + b"".join(contents.values())
    table = np.empty(num_chunks(len(body)), "<u8")
    digest_chunks(memoryview(body), table)
    files, start = [], len(PACK_HEAD)
    for name, data in contents.items():
        files.append(AttachedFile(name, start, len(data), hexdigest(data)))
        start += len(data)
    data = body + table.tobytes()
    digest = hexdigest(table.tobytes())
    return PackEntry(f"{attempt}/{_PACK}", len(data), len(body), digest, tuple(files)), data


class Attachments(Mapping[str, bytes]):
    """The files kept beside an opened step."""

    def __init__(self, images: Files) -> None:
        self._images = images
        found = images.manifest.attached
        self._files = {f.name: f for f in found.files} if found is not None else {}

    def __getitem__(self, name: str) -> bytes:
        """Read a file.  Corrupt if its digest is wrong; KeyError."""
        entry, images = self._files[name], self._images
        object = images.manifest.objects[-1]
        data = bytes(images.part(object, entry.start, entry.start + entry.bytes))
        if images.verify and hexdigest(data) != entry.digest:
            raise Corrupt(
                f"attached file {name!r} differs from what was saved",
                key=images.key(object),
                step=images.manifest.step,
                expected=entry.digest,
                found=hexdigest(data),
            )
        return data

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __repr__(self) -> str:
        return f"<{len(self)} files: {', '.join(self)}>"

    def sizes(self) -> dict[str, int]:
        """Bytes of each file, by name."""
        return {name: entry.bytes for name, entry in self._files.items()}
