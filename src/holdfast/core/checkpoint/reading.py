"""Reading: from wanted boxes to verified bytes in their places.

1. *plan*: `holdfast.core.checkpoint.rows` says which bytes of which files are wanted, and where they go.
2. *chunks*: the digest chunks that the rows touch, merged, are read in blocks, each chunk verified
   before anything uses it.  A block that lies inside one contiguous row goes straight into the
   target's memory; any other is read into scratch and copied out.  All files are opened before.
3. *sharing* (`holdfast.core.checkpoint.sharing`): chunks that several ranks need are read by one of them.

Threads do blocks side by side.  Extra memory: one block per thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from holdfast.base.garbage import uncollected
from holdfast.base.threads import in_threads
from holdfast.core.checkpoint.files import MOST_OPEN, TABLES_BYTES, Files
from holdfast.core.checkpoint.rows import Interval, RowIndex, Want, group_rows, needs, plan_rows
from holdfast.core.format.manifest import FileEntry

if TYPE_CHECKING:
    from holdfast.core.checkpoint.peers import Peers

BLOCK_CHUNKS = 8
"""Chunks that are read at once, unless the store states more (`Store.read_bytes`)."""


def cores_here() -> int:
    """The host's cores, shared among its ranks; at most 4."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(4, max(1, (os.cpu_count() or 2) // ranks))


def threads_here() -> int:
    """Threads for reading: one waits for storage while another works."""
    return max(2, cores_here())


def block_chunks(files: Files) -> int:
    """Chunks of a file that are read at once."""
    return max(BLOCK_CHUNKS, files.store_reads.num_bytes // files.manifest.chunk_bytes)


def threads_for(files: Files) -> int:
    """Threads for reading files: the more, the longer the store takes to begin to answer."""
    return files.store_reads.threads or threads_here()


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive chunks to read at once; straight into `memory` if given."""

    file: FileEntry
    first: int
    stop: int
    memory: memoryview | None


def plan_blocks(
    file: FileEntry, intervals: list[Interval], index: RowIndex, chunk_bytes: int, most: int
) -> list[Block]:
    """Cut intervals of chunks into blocks of at most `most`, direct ones wherever a lone row has its own
    memory."""
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
            blocks += _cut(file, at, a, None, 0, chunk_bytes, most)
            blocks += _cut(file, a, b, memory, row.start, chunk_bytes, most)
            at = b
        blocks += _cut(file, at, stop, None, 0, chunk_bytes, most)
    return blocks


def _cut(
    file: FileEntry,
    first: int,
    stop: int,
    memory: memoryview | None,
    origin: int,
    chunk_bytes: int,
    most: int,
) -> list[Block]:
    out = []
    for a in range(first, stop, most):
        b = min(a + most, stop)
        part = memory and memory[a * chunk_bytes - origin : b * chunk_bytes - origin]
        out.append(Block(file, a, b, part))
    return out


class Scratch(threading.local):
    """One block of memory per thread, which is used again."""

    view: memoryview | None = None

    def get(self, size: int) -> memoryview:
        """Return at least `size` bytes, which hold anything."""
        if self.view is None or len(self.view) < size:
            self.view = memoryview(bytearray(size))
        return self.view


class _HostBlocks:
    """Blocks that are copied out of before the next one is read."""

    def __init__(self) -> None:
        self._scratch = Scratch()

    @contextmanager
    def block(self, size: int) -> Iterator[memoryview]:
        yield self._scratch.get(size)

    def finish(self) -> None:
        return


def run_blocks(
    files: Files, blocks: list[Block], indexes: dict[str, RowIndex], threads: int
) -> None:
    """Read, verify and place every block; the first error ends it."""
    size = files.manifest.chunk_bytes
    most = block_chunks(files) * size
    blocks_of = files.block_memory() if files.block_memory is not None else _HostBlocks()

    def one(block: Block) -> None:
        if block.memory is not None:
            files.chunks(block.file, block.first, block.stop, block.memory)
            return
        with blocks_of.block(most) as memory:
            view = files.chunks(block.file, block.first, block.stop, memory)
            at = block.first * size
            for row in indexes[block.file.path].touching(at, at + len(view)):
                row.place(view, at)

    try:
        in_threads(one, blocks, threads)
    finally:
        blocks_of.finish()


def read_together(files: Files, wants: list[Want], peers: Peers | None) -> None:
    """Fill every rank's wants; the store is read about once for all.  Collective.

    Any rank's failure is raised on every rank, after which targets may be partly overwritten.
    """
    with files.readers.kept():
        plan_together(files, wants, peers)()


def plan_together(files: Files, wants: list[Want], peers: Peers | None) -> Callable[[], None]:
    """Return what fills every rank's wants.  The files that it reads are there, and their tables sound, so
    what can be known to fail has failed here, before any target is overwritten.  Collective, as what is
    returned.

    Call both inside one `kept` block of `files.readers`: what is open can be read to its end, whoever
    deletes it meanwhile.
    """
    if peers is None or peers.size == 1:
        return plan_alone(files, wants)
    from holdfast.core.checkpoint.sharing import plan_shared

    return plan_shared(files, wants, peers)


def read_alone(files: Files, wants: list[Want], threads: int | None = None) -> None:
    """Fill every want from the store, with no help from other ranks."""
    with files.readers.kept():
        plan_alone(files, wants, threads)()


def plan_alone(files: Files, wants: list[Want], threads: int | None = None) -> Callable[[], None]:
    """Return what fills every want, as `plan_together` does."""
    threads = threads or threads_for(files)
    with uncollected():
        indexes = group_rows(plan_rows(files.manifest, wants))
        size = files.manifest.chunk_bytes
        blocks = []
        for path, intervals in needs(indexes, size).items():
            index = indexes[path]
            blocks += plan_blocks(index.rows[0].file, intervals, index, size, block_chunks(files))
    open_all(files, [index.rows[0].file for index in indexes.values()], threads)
    return partial(run_blocks, files, blocks, indexes, threads)


def open_all(files: Files, wanted: list[FileEntry], threads: int) -> None:
    """Open files that are to be read, as many as are kept open, and see that they are whole."""
    tables = sum(f.bytes - f.table for f in wanted)
    if len(wanted) <= MOST_OPEN or (files.verify and tables <= TABLES_BYTES):
        in_threads(files.begin, wanted, threads)
