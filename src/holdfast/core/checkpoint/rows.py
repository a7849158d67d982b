"""Rows: the byte ranges of files that make up wanted boxes.

A want is a box of a tensor and a target, the memory for it.  `Placement.locate` gives the pieces that
overlap the box; each overlap is a `Row`: bytes of a file, and their place in the target.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, repeat
from operator import attrgetter
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from holdfast.base.errors import Corrupt
from holdfast.core.format.manifest import FileEntry, Manifest
from holdfast.core.layout import Box, Stored, flat_range, row_major
from holdfast.core.layout.box import moved
from holdfast.core.layout.pieces import Located, padded

_row_major = lru_cache(4096)(row_major)
"""Cached: there are few shapes and many rows."""

RAW = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
"""Numpy types by element size, for moving raw elements."""

Array = NDArray[Any]
_Ints = NDArray[np.int64]
Interval = tuple[int, int]


class Target(Protocol):
    """Memory for a wanted box."""

    def memory(self) -> memoryview | None:
        """The box as writable flat bytes in row-major order; None if its memory is not so."""

    def put(self, at: tuple[slice, ...], values: Array) -> None:
        """Set elements; `at`: slices relative to the box's start; `values`: of a `RAW` type."""


class ArrayTarget(msgspec.Struct, frozen=True, eq=False):
    """A numpy array of a `RAW` type and the wanted box's shape."""

    array: Array

    def memory(self) -> memoryview | None:
        if not self.array.flags.c_contiguous or not self.array.nbytes:
            return None
        if self.array.dtype.kind == "c":  # a memoryview cannot cast complex
            return memoryview(self.array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        return memoryview(self.array).cast("B")  # type: ignore[arg-type]

    def put(self, at: tuple[slice, ...], values: Array) -> None:
        self.array[at] = values


class Want(msgspec.Struct, frozen=True):
    """A box of tensor number `tensor`, and its target."""

    tensor: int
    box: Box
    target: Target


class Row(msgspec.Struct, frozen=True):
    """A wanted part of one piece; `start..stop`: its byte span in the file."""

    file: FileEntry
    start: int
    stop: int
    origin: int
    """First byte of the piece in the file."""
    piece: Box
    part: Box
    itemsize: int
    solid: bool
    """True if the part is one contiguous range of the file."""
    at: int | None
    """First byte of the part in the want's box; None unless it is contiguous there, too."""
    want: Want
    stored: Stored | None = None
    """Layout of a piece that is not dense; `piece` and `part` then have the stored array's dim order."""

    def place(self, block: memoryview, begin: int) -> None:
        """Copy this row's bytes in `block`, which begins at byte `begin` of the file, to the target."""
        lo, hi = max(self.start, begin), min(self.stop, begin + len(block))
        if lo >= hi:
            return
        memory = self.direct()
        if memory is not None:
            memory[lo - self.start : hi - self.start] = block[lo - begin : hi - begin]
            return
        shape = self.piece.shape
        first, last = (lo - self.origin) // self.itemsize, (hi - self.origin) // self.itemsize
        values = np.frombuffer(block, RAW[self.itemsize], last - first, lo - begin)
        for box in flat_range(shape, first, last):
            self._put(moved(box, self.piece.start), values, first)

    def _put(self, box: Box, values: Array, first: int) -> None:
        common = (box & self.part) if box.start else box
        if common is None:
            return
        strides = self._strides()
        skip = sum((a - o) * s for a, o, s in zip(common.start, self.piece.start, strides)) - first
        view = as_strided(values[skip:], common.shape, [s * self.itemsize for s in strides])
        if self.stored is not None:
            common, view = _logical(self.stored, common, view)
        self.want.target.put(common.within(self.want.box.start), view)

    def _strides(self) -> tuple[int, ...]:
        """Strides of the piece, in elements."""
        return _row_major(self.piece.shape)

    def direct(self) -> memoryview | None:
        """Return the target's memory for exactly `start..stop`; None if that is not contiguous."""
        if self.at is None:
            return None
        memory = self.want.target.memory()
        return memory and memory[self.at : self.at + self.stop - self.start]

    def intervals(self, chunk_bytes: int) -> list[Interval]:
        """Ranges first..stop of the chunks that a row that is not solid touches."""
        starts, length = self._runs(chunk_bytes)
        first = starts // chunk_bytes
        return list(zip(first.tolist(), (-(-(starts + length) // chunk_bytes)).tolist()))

    def _runs(self, near: int) -> tuple[_Ints, int]:
        """Byte offsets of the part's runs in the file, and their length; runs less than `near` bytes apart
        are merged."""
        length, dim, strides = self.itemsize, len(self.part.shape), self._strides()
        while dim:
            stride = strides[dim - 1] * self.itemsize
            if stride - length >= near and self.part.shape[dim - 1] > 1:
                break
            dim -= 1
            length += (self.part.shape[dim] - 1) * stride
        starts = np.array([self.start], np.int64)
        for d in range(dim):
            steps = np.arange(self.part.shape[d], dtype=np.int64) * strides[d] * self.itemsize
            starts = (starts[:, None] + steps[None, :]).reshape(-1)
        return starts, length


def _logical(stored: Stored, box: Box, view: Array) -> tuple[Box, Array]:
    """Reorder a box of a stored array, and its elements, to the tensor's dims."""
    places = stored.places()
    if len(stored.shape) > len(places):
        view = view[..., 0]
    start, stop = (tuple(side[k] for k in places) for side in (box.start, box.stop))
    return Box(start, stop), view.transpose(places)


def plan_rows(manifest: Manifest, wants: list[Want]) -> list[Row]:
    """Return the rows of all wants.  Corrupt if the manifest lacks or misplaces bytes."""
    if not wants:
        return []
    table = manifest.placement.table
    tensor = np.array([w.tensor for w in wants], np.int64)
    boxes = padded([w.box for w in wants], table.shape.shape[1])
    found = manifest.placement.locate(tensor, *boxes)
    spans = _spans(found, table.itemsize[tensor], *boxes)
    columns = (found.want, found.rank, found.offset, *spans)
    pieces, parts = _pieces_and_parts(found, wants, *boxes)
    file_of = manifest.file_of
    rows = []
    for w, rank, offset, itemsize, first, last, solid, at, piece, part, stored in zip(
        *(x.tolist() for x in columns), pieces, parts, found.stored or repeat(None)
    ):
        want = wants[w]
        file = file_of.get(rank)
        if file is None:
            name = table.names[want.tensor]
            raise Corrupt(f"no file of rank {rank} is listed, which holds part of {name!r}")
        if stored is not None:
            piece, part = stored.piece(piece), stored.box(part)
            first, last, solid, at = *_span(piece, part, itemsize), False, -1
        origin = file.data + offset
        start, stop = origin + first, origin + last
        if not file.data <= start <= stop <= file.extras:
            raise Corrupt(f"bytes {start}..{stop} are outside the file's data", key=file.path)
        at = at if at >= 0 else None
        rows.append(Row(file, start, stop, origin, piece, part, itemsize, solid, at, want, stored))
    return rows


def _pieces_and_parts(
    found: Located, wants: list[Want], start: _Ints, stop: _Ints
) -> tuple[list[Box], list[Box]]:
    """Boxes of pieces and of overlaps, by row; the want's own box object if both equal it."""
    pieces = [wants[w].box for w in found.want.tolist()]
    parts = pieces.copy()
    other = (found.piece_start != start[found.want]) | (found.piece_stop != stop[found.want])
    rows = np.flatnonzero(other.any(1))
    corners = (found.piece_start, found.piece_stop, found.start, found.stop)
    for row, a, b, c, d in zip(rows.tolist(), *(x[rows].tolist() for x in corners)):
        n = len(pieces[row].start)
        pieces[row] = parts[row] = Box(tuple(a[:n]), tuple(b[:n]))
        if (a, b) != (c, d):
            parts[row] = Box(tuple(c[:n]), tuple(d[:n]))
    return pieces, parts


def _span(piece: Box, part: Box, itemsize: int) -> Interval:
    """The byte range of a piece from the first to the last element of a part."""
    strides = _row_major(piece.shape)
    first = sum((a - o) * s for a, o, s in zip(part.start, piece.start, strides))
    last = sum((b - 1 - o) * s for b, o, s in zip(part.stop, piece.start, strides))
    return first * itemsize, (last + 1) * itemsize


def _spans(
    found: Located, itemsize: _Ints, want_start: _Ints, want_stop: _Ints
) -> tuple[NDArray[Any], ...]:
    """Per row: item size, byte span in the piece, whether it is solid, and `Row.at` or -1."""
    piece, part = found.piece_stop - found.piece_start, found.stop - found.start
    want_start, itemsize = want_start[found.want], itemsize[found.want]
    box = want_stop[found.want] - want_start
    strides = _strides(piece)
    first = ((found.start - found.piece_start) * strides).sum(1) * itemsize
    last = ((found.stop - 1 - found.piece_start) * strides).sum(1) * itemsize + itemsize
    at = ((found.start - want_start) * _strides(box)).sum(1) * itemsize
    solid = _solid(part, piece)
    return itemsize, first, last, solid, np.where(solid & _solid(part, box), at, -1)


def _strides(shape: _Ints) -> _Ints:
    """Strides, in elements, of contiguous arrays; one row per array."""
    ones = np.ones((len(shape), 1), np.int64)
    return np.concatenate([np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1], ones], axis=1)


def _solid(part: _Ints, shape: _Ints) -> NDArray[np.bool_]:
    """True for each part that is one contiguous run of a row-major array of `shape`."""
    inside = np.cumsum(part != 1, axis=1) - (part != 1) > 0  # an outer dim has size > 1
    found: NDArray[np.bool_] = np.all(~inside | (part == shape), axis=1)
    return found


@dataclass(frozen=True)
class RowIndex:
    """Rows of one file, searchable by byte range."""

    rows: list[Row]
    starts: list[int]
    reach: list[int]
    """Largest stop of rows 0..i, as rows of different wants may overlap."""

    @property
    def file(self) -> FileEntry:
        return self.rows[0].file

    @staticmethod
    def of(rows: list[Row]) -> RowIndex:
        rows = sorted(rows, key=attrgetter("start"))
        reach = list(accumulate([r.stop for r in rows], max))
        return RowIndex(rows, [r.start for r in rows], reach)

    def touching(self, start: int, stop: int) -> list[Row]:
        """Rows that share a byte with start..stop."""
        lo, hi = bisect_right(self.reach, start), bisect_left(self.starts, stop)
        return [r for r in self.rows[lo:hi] if r.stop > start]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Union of half-open intervals, sorted."""
    out: list[Interval] = []
    for a, b in sorted(intervals):
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], b))
        else:
            out.append((a, b))
    return out


def group_rows(rows: list[Row]) -> dict[str, RowIndex]:
    """Rows by file."""
    by_file: dict[str, list[Row]] = {}
    for row in rows:
        by_file.setdefault(row.file.path, []).append(row)
    return {path: RowIndex.of(found) for path, found in by_file.items()}


def needs(indexes: dict[str, RowIndex], chunk_bytes: int) -> dict[str, list[Interval]]:
    """Chunks that the rows of each file touch."""
    return {path: union(_touched(index.rows, chunk_bytes)) for path, index in indexes.items()}


def _touched(rows: list[Row], chunk_bytes: int) -> set[Interval]:
    """Distinct ranges of chunks that rows touch."""
    touched = {(r.start // chunk_bytes, -(-r.stop // chunk_bytes)) for r in rows if r.solid}
    for row in rows:
        if not row.solid:
            touched.update(row.intervals(chunk_bytes))
    return touched
