"""The image: a rank's share of a step, laid out once as the bytes of a safetensors file.

```
0         8            data               extras        table          end
| u64 len | JSON header | piece | piece ... | rank extras | digest table |
```
The header is known before the first byte of data, because shapes are.  It is padded with spaces so
that data begins on a 4096-byte boundary.  Pieces lie back to back in the order of `Placement.pieces`.
The rank's extras (JSON, padded with spaces) and the digest table are tensors of the file too, so any
safetensors reader finds a file without holes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from holdfast.base.errors import FormatError
from holdfast.core.codec.digest import CHUNK_BYTES, num_chunks
from holdfast.core.format.dtypes import dtype_of
from holdfast.core.format.manifest import MAX_EXTRAS_BYTES, TensorEntry
from holdfast.core.layout import Box

if TYPE_CHECKING:
    from holdfast.core.layout.pieces import Pieces

ALIGN = 4096
_EXTRAS_NAME = "holdfast.extras"
_TABLE_NAME = "holdfast.digests"
MAX_HEADER_BYTES = 100_000_000
"""Most bytes of a header, as in the safetensors library."""
_PLAIN = re.compile(r"[\w.,:@/ -]*", re.ASCII).fullmatch
"""Matches names that JSON writes without escapes."""


@dataclass(frozen=True)
class Image:
    """Layout of a rank's file, in byte offsets.  `header` is bytes `0..data`."""

    header: bytes
    pieces: Pieces
    extras_start: int
    table_start: int
    total_bytes: int

    @property
    def data_start(self) -> int:
        return len(self.header)

    @property
    def extras_bytes(self) -> int:
        return self.table_start - self.extras_start

    @property
    def is_empty(self) -> bool:
        """True if it has neither pieces nor extras."""
        return not (self.pieces.total_bytes or self.extras_bytes)

    @property
    def memory_bytes(self) -> int:
        """Bytes of its memory: whole pages, for O_DIRECT."""
        return -(-self.total_bytes // ALIGN) * ALIGN


def plan_image(
    tensors: tuple[TensorEntry, ...],
    pieces: Pieces,
    *,
    extras_bytes: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
    strip: str = "",
) -> Image:
    """Lay out an image; the header's tensor names lose the prefix `strip`."""
    if extras_bytes > MAX_EXTRAS_BYTES:
        raise FormatError(f"extras of {extras_bytes} bytes; at most {MAX_EXTRAS_BYTES}")
    entries = piece_entries(tensors, pieces, strip)
    size = pieces.total_bytes
    longest = size + extras_bytes + 2 * ALIGN + 256 * (len(entries) + 4)
    text = _header_text(entries)
    data_start = 0
    for _ in range(3):  # the header states the table's size, which depends on the header's
        table_start = (data_start or longest) + size + extras_bytes
        header = _header(text, size, extras_bytes, 8 * num_chunks(table_start, chunk_bytes))
        if len(header) == data_start:
            break
        data_start = len(header)
    table_start = data_start + size + extras_bytes
    table_bytes = 8 * num_chunks(table_start, chunk_bytes)
    header = _header(text, size, extras_bytes, table_bytes)
    assert len(header) == data_start
    return Image(header, pieces, data_start + size, table_start, table_start + table_bytes)


def piece_entries(
    tensors: tuple[TensorEntry, ...], pieces: Pieces, strip: str = ""
) -> list[tuple[str, str, str, int, int]]:
    """(name, stored dtype, shape as JSON, start, stop) of each piece, as the header states it.

    A piece that is a whole tensor has its name; a part has `name@start:stop,...`.
    """
    out = []
    columns = (pieces.tensor, pieces.start, pieces.stop, pieces.offset, pieces.bytes)
    for index, start, stop, offset, size in zip(*(c.tolist() for c in columns)):
        t = tensors[index]
        shape = t.shape
        n = len(shape)
        name = t.name.removeprefix(strip)
        if any(start) or tuple(stop[:n]) != shape:
            box = Box(tuple(start[:n]), tuple(stop[:n]))
            name, shape = f"{name}@{box}", box.shape
        out.append((name, *_stored(t.dtype, shape), offset, offset + size))
    return out


@lru_cache(4096)
def _stored(dtype: str, shape: tuple[int, ...]) -> tuple[str, str]:
    """The stored dtype, and the shape as JSON, of a piece."""
    stored = dtype_of(dtype)
    lengths = [*shape, stored.extra] if stored.extra > 1 else list(shape)
    return stored.stored, str(lengths).replace(" ", "")


def _quoted(name: str) -> str:
    """A name as a JSON string; fast for names without escapes."""
    return f'"{name}"' if _PLAIN(name) else json.dumps(name)


def _header_text(entries: list[tuple[str, str, str, int, int]]) -> bytes:
    """The header's JSON for the pieces, without the final brace."""
    rows = ['"__metadata__":{"format":"pt","holdfast":"1"}']
    rows += [
        f'{_quoted(name)}:{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{a},{b}]}}'
        for name, dtype, shape, a, b in entries
    ]
    return ("{" + ",".join(rows)).encode()


def _header(pieces: bytes, size: int, extras_bytes: int, table_bytes: int) -> bytes:
    """The whole header; `pieces`: its JSON for the pieces, whose data has `size` bytes."""
    rows = [pieces]
    for name, bytes_ in ((_EXTRAS_NAME, extras_bytes), (_TABLE_NAME, table_bytes)):
        if bytes_:
            offsets = f"[{size},{size + bytes_}]"
            row = f'"{name}":{{"dtype":"U8","shape":[{bytes_}],"data_offsets":{offsets}}}'
            rows.append(row.encode())
            size += bytes_
    text = b",".join(rows) + b"}"
    text += b" " * (-(8 + len(text)) % ALIGN)
    if len(text) > MAX_HEADER_BYTES:
        raise FormatError(f"image header of {len(text)} bytes; at most {MAX_HEADER_BYTES}")
    return len(text).to_bytes(8, "little") + text
