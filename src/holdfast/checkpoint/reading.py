"""Reading: from wanted boxes to verified bytes in their places.

A want is a box of a tensor and a target, the memory that takes it.  Reading goes in three steps:

1. *plan*: `Placement.locate` says which pieces hold the box; each common part is a `Row`: bytes of a
   file, and where in the target they go.
2. *chunks*: the digest chunks that the rows touch, merged, are read in blocks, each chunk verified
   before anything uses it.  A block that lies inside one contiguous row goes straight into the
   target's memory; any other is read into scratch and copied out.
3. *sharing* (`holdfast.checkpoint.sharing`): chunks that several ranks need are read by one of them.

Threads do blocks side by side.  Extra memory: one block per thread.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from holdfast.codec.digest import Digests, first_difference, hexdigest, num_chunks
from holdfast.errors import Corrupt, HoldfastError
from holdfast.events import count
from holdfast.format.dtypes import DTYPES
from holdfast.format.manifest import FileEntry, Manifest
from holdfast.layout import Box, flat_range, row_major
from holdfast.store import Store

BLOCK_CHUNKS = 8
TABLES_BYTES = 32 << 20
"""Of digest tables to keep: those of a terabyte."""


def threads_here() -> int:
    """Threads for reading: the host's cores, shared among its ranks."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(4, max(1, (os.cpu_count() or 2) // ranks))


_row_major = lru_cache(4096)(row_major)
"""Few shapes, many rows."""

RAW = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
"""Element types by size, for moving bytes about."""

Array = NDArray[Any]
Interval = tuple[int, int]


class Target(Protocol):
    """Memory that takes a wanted box."""

    def memory(self) -> memoryview | None:
        """The box as writable flat bytes in row-major order, if that is what it is in memory."""

    def put(self, at: tuple[slice, ...], values: Array) -> None:
        """Set elements; `at` counts from the box's start, `values` has a `RAW` type."""


@dataclass(frozen=True)
class ArrayTarget:
    """A numpy array of a `RAW` type and the wanted box's shape."""

    array: Array

    def memory(self) -> memoryview | None:
        if not self.array.flags.c_contiguous or not self.array.nbytes:
            return None
        return memoryview(self.array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]

    def put(self, at: tuple[slice, ...], values: Array) -> None:
        self.array[at] = values


@dataclass(frozen=True, slots=True)
class Want:
    """A box of tensor number `tensor` and where it goes."""

    tensor: int
    box: Box
    target: Target


@dataclass(frozen=True, slots=True)
class Row:
    """A wanted part of one piece.  `start..stop`: its span of bytes in the file."""

    file: FileEntry
    start: int
    stop: int
    origin: int
    piece: Box
    part: Box
    itemsize: int
    solid: bool
    fills: bool
    """Whether the part is one contiguous range of the file and of the want's box."""
    strides: tuple[int, ...]
    """Of the piece, in elements."""
    want: Want

    def place(self, block: memoryview, at: int) -> None:
        """Copy what of this row lies in `block`, which begins at byte `at` of the file."""
        lo, hi = max(self.start, at), min(self.stop, at + len(block))
        if lo >= hi:
            return
        memory = self.want.target.memory() if self.fills else None
        if memory is not None:
            base = self._target_byte()
            memory[base + lo - self.start : base + hi - self.start] = block[lo - at : hi - at]
            return
        shape = self.piece.shape
        first, last = (lo - self.origin) // self.itemsize, (hi - self.origin) // self.itemsize
        values = np.frombuffer(block, RAW[self.itemsize], last - first, lo - at)
        for box in flat_range(shape, first, last):
            self._put(_shifted(box, self.piece.start), values, first)

    def _put(self, box: Box, values: Array, first: int) -> None:
        strides = self.strides
        common = (box & self.part) if box.start else box
        if common is None:
            return
        skip = sum((a - o) * s for a, o, s in zip(common.start, self.piece.start, strides)) - first
        view = as_strided(values[skip:], common.shape, [s * self.itemsize for s in strides])
        self.want.target.put(common.within(self.want.box.start), view)

    def _target_byte(self) -> int:
        strides = _row_major(self.want.box.shape)
        origin = self.want.box.start
        return self.itemsize * sum((a - o) * s for a, o, s in zip(self.part.start, origin, strides))

    def direct(self) -> memoryview | None:
        """The target's memory for exactly `start..stop`, if there is such."""
        memory = self.want.target.memory() if self.fills else None
        if memory is None:
            return None
        base = self._target_byte()
        return memory[base : base + self.stop - self.start]

    def intervals(self, chunk_bytes: int) -> list[Interval]:
        """Chunks that the row touches: ranges first..stop."""
        if self.solid:
            return [(self.start // chunk_bytes, -(-self.stop // chunk_bytes))]
        starts, length = self._runs(chunk_bytes)
        first = starts // chunk_bytes
        return list(zip(first.tolist(), (-(-(starts + length) // chunk_bytes)).tolist()))

    def _runs(self, near: int) -> tuple[NDArray[np.int64], int]:
        """Byte offsets of the runs of the part in the file, and their length.

        Runs less than `near` bytes apart count as one, so there are few however tall the part is.
        """
        length, dim = self.itemsize, len(self.part.shape)
        while dim:
            stride = self.strides[dim - 1] * self.itemsize
            if stride - length >= near and self.part.shape[dim - 1] > 1:
                break
            dim -= 1
            length += (self.part.shape[dim] - 1) * stride
        starts = np.array([self.start], np.int64)
        for d in range(dim):
            steps = np.arange(self.part.shape[d], dtype=np.int64) * self.strides[d] * self.itemsize
            starts = (starts[:, None] + steps[None, :]).reshape(-1)
        return starts, length


def _shifted(box: Box, by: tuple[int, ...]) -> Box:
    return Box(
        tuple(a + o for a, o in zip(box.start, by)), tuple(b + o for b, o in zip(box.stop, by))
    )


def _solid(part: Box, shape: tuple[int, ...]) -> bool:
    """Whether `part` is one contiguous run of a row-major array of `shape`."""
    sizes = part.shape
    dim = next((d for d, n in enumerate(sizes) if n != 1), len(sizes))
    return all(a == b for a, b in zip(sizes[dim + 1 :], shape[dim + 1 :]))


def plan_rows(manifest: Manifest, wants: list[Want]) -> list[Row]:
    """Which bytes of which files make up the wants."""
    if not wants:
        return []
    placement = manifest.placement
    width = placement.table.shape.shape[1]
    start = np.zeros((len(wants), width), np.int64)
    stop = np.ones((len(wants), width), np.int64)
    for i, want in enumerate(wants):
        n = len(want.box.start)
        start[i, :n], stop[i, :n] = want.box.start, want.box.stop
    found = placement.locate(np.array([w.tensor for w in wants], np.int64), start, stop)
    rows = []
    columns = (
        found.want, found.rank, found.offset,
        found.piece_start, found.piece_stop, found.start, found.stop,
    )  # fmt: skip
    for w, rank, offset, a, b, c, d in zip(*(x.tolist() for x in columns)):
        want = wants[w]
        n = len(want.box.start)
        file = manifest.file_of.get(rank)
        if file is None:
            name = manifest.tensors[want.tensor].name
            raise Corrupt(f"no file of rank {rank} is listed, which holds part of {name!r}")
        piece, part = Box(tuple(a[:n]), tuple(b[:n])), Box(tuple(c[:n]), tuple(d[:n]))
        itemsize = DTYPES[manifest.tensors[want.tensor].dtype].bytes
        rows.append(_row(file, file.data + offset, piece, part, itemsize, want))
    return rows


def _row(file: FileEntry, origin: int, piece: Box, part: Box, itemsize: int, want: Want) -> Row:
    strides = _row_major(piece.shape)
    first = sum((p - o) * s for p, o, s in zip(part.start, piece.start, strides))
    last = sum((p - 1 - o) * s for p, o, s in zip(part.stop, piece.start, strides))
    start, stop = origin + first * itemsize, origin + (last + 1) * itemsize
    if not file.data <= start <= stop <= file.extras:
        raise Corrupt(f"bytes {start}..{stop} are outside the file's data", key=file.path)
    solid = _solid(part, piece.shape)
    fills = solid and _solid(part, want.box.shape)
    return Row(file, start, stop, origin, piece, part, itemsize, solid, fills, strides, want)


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Union of half-open intervals, sorted."""
    out: list[Interval] = []
    for a, b in sorted(intervals):
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], b))
        else:
            out.append((a, b))
    return out


class Files:
    """Verified ranges of a step's files.  Thread-safe; the digest tables used last are kept."""

    def __init__(self, store: Store, prefix: str, manifest: Manifest, *, verify: bool) -> None:
        self.store = store
        self.prefix = prefix
        self.manifest = manifest
        self.verify = verify
        self._tables: dict[str, Digests] = {}
        """The last used last."""
        self._reading: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def key(self, file: FileEntry) -> str:
        return self.prefix + file.path

    def table(self, file: FileEntry) -> Digests:
        """The digest of every chunk; Corrupt if the table itself is damaged."""
        with self._lock:
            found = self._kept(file)
            reading = self._reading.setdefault(file.path, threading.Lock())
        if found is not None:
            return found
        with reading:
            with self._lock:
                found = self._kept(file)
            if found is None:
                found = self._read_table(file)
                with self._lock:
                    self._keep(file, found)
        return found

    def _kept(self, file: FileEntry) -> Digests | None:
        found = self._tables.pop(file.path, None)
        if found is not None:
            self._tables[file.path] = found
        return found

    def _keep(self, file: FileEntry, table: Digests) -> None:
        self._tables[file.path] = table
        while len(self._tables) > 1 and sum(t.nbytes for t in self._tables.values()) > TABLES_BYTES:
            del self._tables[next(iter(self._tables))]

    def _read_table(self, file: FileEntry) -> Digests:
        self._check_size(file)
        data = bytearray(file.bytes - file.table)
        self._read(file, file.table, memoryview(data))
        if (found := hexdigest(data)) != file.digest:
            raise Corrupt(
                f"digest table differs from the manifest: {found}, expected {file.digest}",
                key=self.key(file),
                start=file.table,
                stop=file.bytes,
                expected=file.digest,
                found=found,
                step=self.manifest.step,
            )
        return np.frombuffer(bytes(data), "<u8")

    def _check_size(self, file: FileEntry) -> None:
        """Before memory is set aside for what a manifest merely states."""
        try:
            size = self.store.size(self.key(file))
        except HoldfastError as error:
            error.step = self.manifest.step
            raise
        if size != file.bytes:
            raise Corrupt(
                f"the file has {size} bytes, expected {file.bytes}",
                key=self.key(file),
                start=min(size, file.bytes),
                stop=max(size, file.bytes),
                expected=f"{file.bytes} bytes",
                found=f"{size} bytes",
                step=self.manifest.step,
            )

    def _read(self, file: FileEntry, offset: int, into: memoryview) -> None:
        try:
            self.store.read(self.key(file), offset, into)
        except HoldfastError as error:
            error.step = self.manifest.step
            raise
        count("read.bytes", len(into))

    def span(self, file: FileEntry, first: int, stop: int) -> tuple[int, int]:
        """Byte range of chunks first..stop."""
        size = self.manifest.chunk_bytes
        return first * size, min(stop * size, file.table)

    def chunks(self, file: FileEntry, first: int, stop: int, into: memoryview) -> memoryview:
        """Read and verify chunks first..stop into the head of `into`; returns that head."""
        a, b = self.span(file, first, stop)
        view = into[: b - a]
        self._read(file, a, view)
        self.check(file, first, view)
        return view

    def check(self, file: FileEntry, first: int, view: memoryview) -> None:
        """Corrupt if the chunks in `view`, beginning with chunk `first`, are not what was written."""
        if not self.verify:
            return
        size = self.manifest.chunk_bytes
        expected = self.table(file)[first : first + num_chunks(len(view), size)]
        bad = first_difference(view, expected, size)
        if bad is not None:
            a, b = self.span(file, first + bad, first + bad + 1)
            found = hexdigest(view[bad * size : (bad + 1) * size])
            raise Corrupt(
                f"bytes {a}..{b} differ from what was written: "
                f"digest {found}, expected {int(expected[bad]):016x}",
                key=self.key(file),
                start=a,
                stop=b,
                expected=f"{int(expected[bad]):016x}",
                found=found,
                step=self.manifest.step,
            )


@dataclass(frozen=True)
class RowIndex:
    """Rows of one file, findable by byte range."""

    rows: list[Row]
    starts: list[int]
    reach: list[int]
    """Largest stop of rows 0..i: rows may overlap where two wants share bytes."""

    @staticmethod
    def of(rows: list[Row]) -> RowIndex:
        rows = sorted(rows, key=lambda r: r.start)
        reach, top = [], 0
        for row in rows:
            top = max(top, row.stop)
            reach.append(top)
        return RowIndex(rows, [r.start for r in rows], reach)

    def touching(self, start: int, stop: int) -> list[Row]:
        """Rows that share a byte with start..stop."""
        lo, hi = bisect_right(self.reach, start), bisect_left(self.starts, stop)
        return [r for r in self.rows[lo:hi] if r.stop > start]


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive chunks to read at once; straight into `memory` if given."""

    file: FileEntry
    first: int
    stop: int
    memory: memoryview | None


def plan_blocks(
    file: FileEntry, intervals: list[Interval], index: RowIndex, chunk_bytes: int
) -> list[Block]:
    """Cut intervals of chunks into blocks, direct ones wherever a lone row has its own memory."""
    blocks: list[Block] = []
    for first, stop in intervals:
        at = first
        for row in index.touching(first * chunk_bytes, stop * chunk_bytes):
            a = max(-(-row.start // chunk_bytes), at)
            b = min(row.stop // chunk_bytes, stop)
            if b <= a:
                continue
            memory = row.direct()
            if memory is None or len(index.touching(a * chunk_bytes, b * chunk_bytes)) > 1:
                continue
            blocks += _cut(file, at, a, None, 0, chunk_bytes)
            blocks += _cut(file, a, b, memory, row.start, chunk_bytes)
            at = b
        blocks += _cut(file, at, stop, None, 0, chunk_bytes)
    return blocks


def _cut(
    file: FileEntry, first: int, stop: int, memory: memoryview | None, origin: int, chunk_bytes: int
) -> list[Block]:
    out = []
    for a in range(first, stop, BLOCK_CHUNKS):
        b = min(a + BLOCK_CHUNKS, stop)
        part = memory and memory[a * chunk_bytes - origin : b * chunk_bytes - origin]
        out.append(Block(file, a, b, part))
    return out


class Scratch(threading.local):
    """One block of memory per thread."""

    view: memoryview | None = None

    def get(self, size: int) -> memoryview:
        if self.view is None or len(self.view) < size:
            self.view = memoryview(bytearray(size))
        return self.view


def run_blocks(
    files: Files, blocks: list[Block], indexes: dict[str, RowIndex], threads: int
) -> None:
    """Read, verify and place every block; the first error ends it."""
    size = files.manifest.chunk_bytes
    scratch = Scratch()

    def one(block: Block) -> None:
        if block.memory is not None:
            files.chunks(block.file, block.first, block.stop, block.memory)
            return
        view = files.chunks(block.file, block.first, block.stop, scratch.get(BLOCK_CHUNKS * size))
        at = block.first * size
        for row in indexes[block.file.path].touching(at, at + len(view)):
            row.place(view, at)

    in_threads(one, blocks, threads)


def in_threads(work: Callable[[Any], None], items: list[Any], threads: int) -> None:
    """Call `work` for every item from several threads; the first error stops the rest."""
    if threads == 1 or len(items) < 2:
        for item in items:
            work(item)
        return
    todo = iter(items)
    lock = threading.Lock()
    stop = threading.Event()

    def drain() -> None:
        while not stop.is_set():
            with lock:
                item = next(todo, None)
            if item is None:
                return
            try:
                work(item)
            except BaseException:
                stop.set()
                raise

    with ThreadPoolExecutor(threads, "holdfast-io") as pool:
        futures = [pool.submit(drain) for _ in range(min(threads, len(items)))]
    for future in futures:
        future.result()


def group_rows(rows: list[Row]) -> dict[str, RowIndex]:
    """Rows by file."""
    by_file: dict[str, list[Row]] = {}
    for row in rows:
        by_file.setdefault(row.file.path, []).append(row)
    return {path: RowIndex.of(found) for path, found in by_file.items()}


def needs(indexes: dict[str, RowIndex], chunk_bytes: int) -> dict[str, list[Interval]]:
    """Chunks that the rows of each file touch."""
    return {
        path: merge(i for row in index.rows for i in row.intervals(chunk_bytes))
        for path, index in indexes.items()
    }


def read_alone(files: Files, wants: list[Want]) -> None:
    """Fill every want from the store, with no help from other ranks."""
    threads = threads_here()
    indexes = group_rows(plan_rows(files.manifest, wants))
    size = files.manifest.chunk_bytes
    blocks = []
    for path, intervals in needs(indexes, size).items():
        index = indexes[path]
        blocks += plan_blocks(index.rows[0].file, intervals, index, size)
    run_blocks(files, blocks, indexes, threads)
