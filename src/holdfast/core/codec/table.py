"""The digest table of a file, and the check of bytes against it.

```
| chunk 0 | chunk 1 | ... | last, shorter | digest 0, digest 1, ... |
0                                         end                       end + 8 * num_chunks(end)
```

A table is trusted once its digest equals the one in a manifest or header; then any run of chunks can be
checked by itself.  Corrupt states which bytes differ; the caller adds the key of the file.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.base.errors import Corrupt
from holdfast.core.codec.digest import (
    CHUNK_BYTES,
    digest,
    digest_chunks,
    hexdigest,
    num_chunks,
)


@dataclass(frozen=True, slots=True)
class DigestTable:
    """The digests of bytes 0..`end` of a file, in chunks of `chunk_bytes`."""

    digests: NDArray[np.uint64]
    end: int
    chunk_bytes: int = CHUNK_BYTES

    @classmethod
    def of(
        cls, data: bytes | bytearray, digest: str, end: int, chunk_bytes: int = CHUNK_BYTES
    ) -> DigestTable:
        """Return the table in `data`, which it keeps a reference to.  Corrupt if its digest is not
        `digest`."""
        if (found := hexdigest(data)) != digest:
            raise Corrupt(
                f"digest table differs from the manifest: {found}, expected {digest}",
                start=end,
                stop=end + len(data),
                expected=digest,
                found=found,
            )
        return cls(np.frombuffer(data, "<u8"), end, chunk_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self.digests.nbytes

    def span(self, first: int, stop: int) -> tuple[int, int]:
        """Return the byte range of chunks first..stop."""
        return first * self.chunk_bytes, min(stop * self.chunk_bytes, self.end)

    def check(self, first: int, view: memoryview) -> None:
        """Corrupt if a chunk of `view`, which begins with chunk `first`, differs from its digest."""
        size = self.chunk_bytes
        expected = self.digests[first : first + num_chunks(len(view), size)]
        bad = first_difference(view, expected, size)
        if bad is None:
            return
        start, stop = self.span(first + bad, first + bad + 1)
        wanted, found = f"{expected[bad]:016x}", hexdigest(view[bad * size : (bad + 1) * size])
        raise Corrupt(
            f"bytes {start}..{stop} differ from what was written: digest {found}, expected {wanted}",
            start=start,
            stop=stop,
            expected=wanted,
            found=found,
        )

    def differing(self, first: int, view: memoryview) -> list[int]:
        """Return the number of each chunk of `view`, which begins with chunk `first`, that differs."""
        found = np.empty(num_chunks(len(view), self.chunk_bytes), "<u8")
        digest_chunks(view, found, self.chunk_bytes)
        differs = found != self.digests[first : first + len(found)]
        return [first + int(i) for i in np.flatnonzero(differs)]


def first_difference(
    data: memoryview, expected: NDArray[np.uint64], chunk_bytes: int
) -> int | None:
    """Index of the first chunk whose digest is not the expected one, None if all agree."""
    for i, want in enumerate(expected.tolist()):
        if digest(data[i * chunk_bytes : (i + 1) * chunk_bytes]) != want:
            return i
    return None
