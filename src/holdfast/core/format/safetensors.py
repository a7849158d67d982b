"""The header of any safetensors file: names, dtypes, shapes and byte ranges of its tensors.

``` | u64 len | JSON header, len bytes | data of every tensor, back to back | ``` One rule makes a file
sound: in the order of their offsets, each tensor begins where the one before ends, the first at the start
of the data, and the last ends with the file.  It catches holes, overlaps, files cut short and files with
a tail.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from holdfast.base.errors import Corrupt, FormatError
from holdfast.core.format.dtypes import DTYPES
from holdfast.core.format.image import MAX_HEADER_BYTES

_MAX_DIMS = 64

NAMED = {d.stored: d.name for d in DTYPES.values() if d.extra == 1 and d.stored != "U8"} | {
    "U8": "uint8",
    "C64": "complex64",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
"""dtypes by their safetensors names."""


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """A tensor of a safetensors file; `start`: its first byte in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """The tensors of a safetensors file in the order of their bytes, and the writer's `metadata`."""

    entries: tuple[HeaderEntry, ...]
    metadata: dict[str, str]


def read_safetensors_header(read: Callable[[int, int], bytes], file_bytes: int, key: str) -> Header:
    """Read the header; `read(start, stop)` returns bytes of the file.  Corrupt or FormatError."""
    if file_bytes < 8:
        raise Corrupt(f"not a safetensors file: it has {file_bytes} bytes", key=key)
    size = int.from_bytes(read(0, 8), "little")
    if size > min(MAX_HEADER_BYTES, file_bytes - 8):
        raise Corrupt(
            f"not a whole safetensors file: a header of {size} bytes in a file of {file_bytes}",
            key=key,
            hint="was it copied or downloaded whole?",
        )
    rows = _rows(read(8, 8 + size), key)
    metadata = rows.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise FormatError("malformed safetensors header: its metadata is no dict", key=key)
    entries = [_entry(name, row, 8 + size, key) for name, row in rows.items()]
    entries.sort(key=lambda e: (e.start, e.bytes))
    _check_contiguous(entries, 8 + size, file_bytes, key)
    return Header(tuple(entries), {str(k): str(v) for k, v in metadata.items()})


def _rows(data: bytes, key: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise FormatError(f"malformed safetensors header: {twice!r} is there twice", key=key)
        return found

    try:
        rows = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"malformed safetensors header: {error}", key=key) from None
    if not isinstance(rows, dict):
        raise Corrupt("malformed safetensors header: no dict", key=key)
    return rows


def _entry(name: str, row: Any, data: int, key: str) -> HeaderEntry:
    try:
        stored, shape, (start, stop) = row["dtype"], tuple(row["shape"]), row["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise FormatError(f"malformed safetensors header: {name!r}", key=key) from None
    if not isinstance(stored, str) or stored not in NAMED:
        raise FormatError(
            f"{name!r}: unknown dtype {stored!r}",
            key=key,
            hint=f"holdfast reads {', '.join(sorted(NAMED))}",
        )
    numbers = (*shape, start, stop)
    plain = all(type(n) is int and 0 <= n < 1 << 60 for n in numbers) and len(shape) <= _MAX_DIMS
    expected = prod(shape) * DTYPES[NAMED[stored]].bytes if plain else -1
    if not plain or stop - start != expected:
        raise Corrupt(
            f"{name!r}: {stored} of shape {list(shape)} in bytes {start}..{stop}", key=key
        )
    return HeaderEntry(name, NAMED[stored], shape, data + start, expected)


def _check_contiguous(entries: list[HeaderEntry], data: int, file_bytes: int, key: str) -> None:
    reached = data
    for e in entries:
        if e.start != reached:
            what = "overlaps what is before it" if e.start < reached else "leaves a hole before it"
            raise Corrupt(f"{e.name!r} {what}: it begins at byte {e.start}, not {reached}", key=key)
        reached += e.bytes
    if reached != file_bytes:
        raise Corrupt(
            f"the file has {file_bytes} bytes, but its header states {reached}",
            key=key,
            start=min(reached, file_bytes),
            stop=max(reached, file_bytes),
            expected=f"{reached} bytes",
            found=f"{file_bytes} bytes",
            hint="was it copied or downloaded whole?",
        )


def weight_index(num_bytes: int, files: Mapping[str, str]) -> bytes:
    """Return an index of shards, as Hugging Face's loaders read it: the file of each tensor, by name."""
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(files.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()
