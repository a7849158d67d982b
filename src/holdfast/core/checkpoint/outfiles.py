"""Writing files of any format from a checkpoint's tensors.

A file is planned completely before any byte is read: literal bytes (headers), and spans of tensors between
them.  Then blocks of all files are filled directly from the source, several in parallel, so memory is a few
blocks however large the files are.  Bytes that depend on the data (a digest table, a CRC) are added by the
file's *seal*, which gets the blocks of a file in order, each before it is written.

    span = Span(len(header), tensor=0, first=0, last=10, dtype="float32")
    file = Outfile("model.safetensors", len(header) + 40, (Literal(0, header),), (span,))
    write_files(source, store, [file], memory_bytes=1 << 30)

Each file appears whole or not at all.  A store whose writers are `Continuing` goes on with blocks that an
earlier try has written.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from holdfast.base.errors import Corrupt, UsageError
from holdfast.base.threads import ThreadPages, in_threads
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.reading import read_alone, threads_here
from holdfast.core.checkpoint.rows import RAW, ArrayTarget, Want
from holdfast.core.codec.digest import digest
from holdfast.core.format.dtypes import DTYPES, numpy_dtype
from holdfast.core.layout import flat_range
from holdfast.core.store import Store, Writer
from holdfast.core.store.contract import check_blocks, reads_of

_MAX_BLOCK_BYTES = 16 << 20
_MIN_BLOCK_BYTES = 1 << 20
_CAST_BYTES = 2 << 20
_READ_BYTES = 2 << 20
"""Bytes of scratch of a reading thread (`reading.BLOCK_CHUNKS` chunks)."""
MIN_MEMORY_BYTES = _MIN_BLOCK_BYTES + _CAST_BYTES + _READ_BYTES

Progress = Callable[[int], object]
_Seal = Callable[[int, memoryview], None]
"""Called in order with each block's offset and the block, which it may change."""


@runtime_checkable
class Continuing(Writer, Protocol):
    """A writer of a file that an earlier try may have begun."""

    def read_back(self, offset: int, into: memoryview) -> bool:
        """Fill `into` with the part that an earlier try wrote at `offset`, which need not be written again;
        False if there is none."""


@dataclass(frozen=True, slots=True)
class Literal:
    """Constant bytes, at byte `start` of a file."""

    start: int
    data: bytes

    @property
    def stop(self) -> int:
        return self.start + len(self.data)


@dataclass(frozen=True, slots=True)
class ElementSpan:
    """Elements `first..last` (row-major) of a tensor, as `dtype`, at byte `start` of a file.

    `tensor` is its number in the source; `start` is a multiple of the size of an element.
    """

    start: int
    tensor: int
    first: int
    last: int
    dtype: str

    @property
    def stop(self) -> int:
        return self.start + (self.last - self.first) * DTYPES[self.dtype].bytes


@dataclass(frozen=True)
class Outfile:
    """A planned file.  Bytes that neither literals nor spans cover are zero, or written by the seal."""

    path: str
    bytes: int
    literals: tuple[Literal, ...]
    spans: tuple[ElementSpan, ...]
    seal: Callable[[], _Seal] | None = None
    """Returns a new seal for each time that the file is written."""


@dataclass(frozen=True)
class FileDigests:
    """Digests of a file's blocks."""

    path: str
    bytes: int
    block_bytes: int
    digests: tuple[int, ...]


def write_files(
    source: Checkpoint,
    store: Store | None,
    files: Sequence[Outfile],
    *,
    memory_bytes: int = 1 << 30,
    progress: Progress | None = None,
) -> list[FileDigests]:
    """Write all files, large ones first.  Blocks; the first error stops all, and no torn file appears.

    `memory_bytes` bounds the buffers; `progress` is called with the bytes just written.  Without a store
    nothing is written: the returned digests are for `read_back` of existing files.
    """
    threads, block_bytes = _shares(memory_bytes)
    jobs = [
        _UnfinishedFile(source, store, f, block_bytes)
        for f in sorted(files, key=lambda f: -f.bytes)
    ]
    blocks = [(job, start) for job in jobs for start in job.starts()]
    buffers = ThreadPages()
    tell = progress or (lambda _: None)
    errors: list[BaseException] = []

    def one(block: tuple[_UnfinishedFile, int]) -> None:
        job, start = block
        try:
            tell(job.write(start, buffers.get(block_bytes)))
        except BaseException as error:
            errors.append(error)
            for job in jobs:
                job.fail()
            raise

    try:
        with source.images.readers.kept():
            in_threads(one, blocks, threads)
    except BaseException:
        if errors:  # other errors only follow from the first
            raise errors[0] from None
        raise
    finally:
        for job in jobs:
            job.abort()
    return [job.written() for job in jobs]


def read_back(
    store: Store, files: Sequence[FileDigests], *, progress: Progress | None = None
) -> None:
    """Read files from storage.  Corrupt states the first range that differs from the digests."""
    tell = progress or (lambda _: None)
    buffers = ThreadPages()

    def one(block: tuple[FileDigests, int, int]) -> None:
        file, start, expected = block
        view = buffers.get(min(file.block_bytes, file.bytes - start))
        if len(view):
            with closing(getattr(store, "open_once", store.open)(file.path)) as reader:
                reader.read(start, view)
        if digest(view) != expected:
            what = f"bytes {start}..{start + len(view)} are not what was written"
            raise Corrupt(what, key=file.path, hint="is the disk sound?  Convert again")
        tell(len(view))

    for file in files:
        if store.size(file.path) != file.bytes:
            raise Corrupt(f"{store.size(file.path)} bytes, {file.bytes} written", key=file.path)
    blocks = [(f, i * f.block_bytes, d) for f in files for i, d in enumerate(f.digests)]
    in_threads(one, blocks, reads_of(store).threads or threads_here())


def _shares(memory_bytes: int) -> tuple[int, int]:
    """Number of threads and bytes of a block, within `memory_bytes`."""
    if memory_bytes < MIN_MEMORY_BYTES:
        raise UsageError(f"memory_bytes={memory_bytes}: at least {MIN_MEMORY_BYTES} are needed")
    cores = max(1, (os.cpu_count() or 2) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    threads = min(max(4, min(cores, 16)), memory_bytes // MIN_MEMORY_BYTES)
    block = memory_bytes // threads - _CAST_BYTES - _READ_BYTES
    return threads, min(block // _MIN_BLOCK_BYTES * _MIN_BLOCK_BYTES, _MAX_BLOCK_BYTES)


class _GivenUpError(Exception):
    """Another block failed."""


class _UnfinishedFile:
    """A file being written; its blocks come from several threads."""

    def __init__(
        self, source: Checkpoint, store: Store | None, file: Outfile, block_bytes: int
    ) -> None:
        self._source = source
        self._store = store
        self._file = file
        self._block_bytes = block_bytes
        self._parts: list[Literal | ElementSpan] = sorted(
            [*file.literals, *file.spans], key=lambda part: part.start
        )
        self._starts = [part.start for part in self._parts]
        self._stops = [part.stop for part in self._parts]
        self._turn = threading.Condition()
        self._writer: Writer | None = None
        self._seal = file.seal() if file.seal else None
        self._digests: list[int] = []
        self._num_done = 0
        self._failed = False

    def starts(self) -> range:
        return range(0, max(self._file.bytes, 1), self._block_bytes)

    def write(self, start: int, buffer: memoryview) -> int:
        """Fill, seal and write one block; return its number of bytes.  The last block written finishes the
        file."""
        block = buffer[: min(self._block_bytes, self._file.bytes - start)]
        writer = self._opened()
        is_there = isinstance(writer, Continuing) and writer.read_back(start, block)
        if not is_there:
            self._fill(start, block)
        with self._in_order(start):
            if self._seal is not None:
                self._seal(start, block)  # of a block that is there, the same bytes once more
        self._digests[start // self._block_bytes] = digest(block)
        if writer is not None:
            self._put(writer, start, block if not is_there else block[:0])
        return len(block)

    def _opened(self) -> Writer | None:
        """Return the writer of the file, which the first block opens; None without a store."""
        with self._turn:
            if self._store is not None and self._writer is None:
                if self._failed:
                    raise _GivenUpError
                self._writer = self._store.create(self._file.path, self._file.bytes)
                hint = "write to a file system"
                check_blocks(self._writer, self._file.path, self._block_bytes, hint)
            return self._writer

    def _put(self, writer: Writer, start: int, block: memoryview) -> None:
        if len(block):
            writer.write(start, block)
        with self._turn:
            self._num_done += 1
            last = self._num_done == len(self.starts())
        if last:
            writer.finish()
            self._writer = None

    def written(self) -> FileDigests:
        return FileDigests(
            self._file.path, self._file.bytes, self._block_bytes, tuple(self._digests)
        )

    @contextmanager
    def _in_order(self, start: int) -> Iterator[None]:
        with self._turn:
            self._turn.wait_for(
                lambda: len(self._digests) * self._block_bytes == start or self._failed
            )
            if self._failed:
                raise _GivenUpError
            yield
            self._digests.append(0)
            self._turn.notify_all()

    def fail(self) -> None:
        """Wake the threads that wait for a block that will not come."""
        with self._turn:
            self._failed = True
            self._turn.notify_all()

    def abort(self) -> None:
        """Discard the file unless it is finished."""
        if self._writer is not None:
            self._writer.abort()

    def _fill(self, start: int, block: memoryview) -> None:
        stop = start + len(block)
        lo, hi = bisect_right(self._stops, start), bisect_left(self._starts, stop)
        at, wants = start, []
        for part in self._parts[lo:hi]:
            _zero(block[at - start : max(part.start, at) - start])
            a, b = max(part.start, start), min(part.stop, stop)
            into = block[a - start : b - start]
            if isinstance(part, Literal):
                into[:] = part.data[a - part.start : b - part.start]
            else:
                wants += self._wants(part, a, into)
            at = max(at, b)
        _zero(block[at - start :])
        read_alone(self._source.images, wants, threads=1)

    def _wants(self, span: ElementSpan, at: int, into: memoryview) -> list[Want]:
        """Wants that fill `into`, the span's bytes from file byte `at` on; spans with a cast are filled
        now."""
        tensor = self._source.manifest.tensors[span.tensor]
        itemsize = DTYPES[span.dtype].bytes
        first = span.first + (at - span.start) // itemsize
        if tensor.dtype == span.dtype:
            return _boxes(span.tensor, tensor.shape, first, into, itemsize)
        for begin in range(0, len(into), _CAST_BYTES // 16 * itemsize):
            part = into[begin : begin + _CAST_BYTES // 16 * itemsize]
            self._cast(span, first + begin // itemsize, part)
        return []

    def _cast(self, span: ElementSpan, first: int, into: memoryview) -> None:
        tensor = self._source.manifest.tensors[span.tensor]
        kind = numpy_dtype(tensor.dtype)
        target = np.frombuffer(into, numpy_dtype(span.dtype))
        values = np.empty(len(target), kind)
        raw = memoryview(values.view(np.uint8))  # type: ignore[arg-type]
        wants = _boxes(span.tensor, tensor.shape, first, raw, kind.itemsize)
        read_alone(self._source.images, wants, threads=1)
        with np.errstate(over="ignore"):
            target[:] = values.astype(target.dtype)
        lost = _lost(values, target)
        if lost is not None:
            value = f"{float(values[lost][0]):g}"
            raise UsageError(
                f"{tensor.name!r}: saved as {tensor.dtype}, and {value} is no {span.dtype}",
                hint="bfloat16 has the range of float32",
            )


def _lost(values: Any, cast: Any) -> Any:
    """Mask of floats whose cast changed finite to infinite or NaN, or back; None if there are none."""
    if np.isfinite(cast).all():
        return None
    lost = np.isfinite(values) & ~np.isfinite(cast)
    lost |= ~np.isfinite(values) & (np.isnan(values) != np.isnan(cast))
    return lost if lost.any() else None


def _zero(view: memoryview) -> None:
    if len(view):
        np.frombuffer(view, np.uint8)[:] = 0


def _boxes(
    tensor: int, shape: tuple[int, ...], first: int, into: memoryview, itemsize: int
) -> list[Want]:
    """Elements `first..` of a tensor as boxes whose targets are consecutive parts of `into`."""
    wants, at = [], 0
    for box in flat_range(shape, first, first + len(into) // itemsize):
        kind: Any = RAW[itemsize]
        array = np.frombuffer(into, kind, box.size, at).reshape(box.shape)
        wants.append(Want(tensor, box, ArrayTarget(array)))
        at += box.size * itemsize
    return wants
