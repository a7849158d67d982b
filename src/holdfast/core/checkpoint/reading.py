"""Reading: from wanted boxes to verified bytes in their places.

1. *plan*: `holdfast.core.checkpoint.rows` maps wanted boxes to bytes of files and their targets.
2. *chunks*: the digest chunks that the rows touch are merged and read in blocks, each chunk verified before
   use.  A block inside one contiguous row is read directly into the target's memory; any other into scratch
   memory and copied.  All files are opened first.
3. *sharing* (`holdfast.core.checkpoint.sharing`): chunks that several ranks need are read by one of them.

Threads read blocks in parallel.  Extra memory: one block per thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from holdfast.base.gc_pause import uncollected
from holdfast.base.threads import in_threads
from holdfast.core.checkpoint.files import MOST_OPEN, TABLES_BYTES, Files
from holdfast.core.checkpoint.rows import Interval, RowIndex, Want, group_rows, needs, plan_rows
from holdfast.core.format.manifest import FileEntry

if TYPE_CHECKING:
    from holdfast.core.group import Group

BLOCK_CHUNKS = 8
"""Chunks read at once, unless the store asks for more (`read_bytes`)."""


def cores_here() -> int:
    """Cores per rank of this host; at most 4."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(4, max(1, (os.cpu_count() or 2) // ranks))


def threads_here() -> int:
    """Threads for reading: one waits for storage while another works."""
    return max(2, cores_here())


def block_chunks(files: Files) -> int:
    """Number of chunks of a file to read at once."""
    return max(BLOCK_CHUNKS, files.store_reads.num_bytes // files.manifest.chunk_bytes)


def threads_for(files: Files) -> int:
    """Threads for reading files; more for a store with a high latency."""
    return files.store_reads.threads or threads_here()


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive chunks to read at once; directly into `memory` if given."""

    file: FileEntry
    first: int
    stop: int
    memory: memoryview | None


def plan_blocks(
    file: FileEntry, intervals: list[Interval], index: RowIndex, chunk_bytes: int, most: int
) -> list[Block]:
    """Cut intervals of chunks into blocks of at most `most` chunks, direct ones if a single row covers them
    in contiguous memory."""
    blocks: list[Block] = []

    def cut(first: int, stop: int, memory: memoryview | None = None, origin: int = 0) -> None:
        for a in range(first, stop, most):
            b = min(a + most, stop)
            part = memory and memory[a * chunk_bytes - origin : b * chunk_bytes - origin]
            blocks.append(Block(file, a, b, part))

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
            cut(at, a)
            cut(a, b, memory, row.start)
            at = b
        cut(at, stop)
    return blocks


def blocks_of(
    files: Files, indexes: dict[str, RowIndex], needed: dict[str, list[Interval]]
) -> list[Block]:
    """The blocks that cover the `needed` chunks of files, by path."""
    size, most = files.manifest.chunk_bytes, block_chunks(files)
    return [
        block
        for path, intervals in needed.items()
        for block in plan_blocks(indexes[path].file, intervals, indexes[path], size, most)
    ]


class Scratch(threading.local):
    """One reusable buffer per thread."""

    view: memoryview | None = None

    def get(self, size: int) -> memoryview:
        """Return at least `size` uninitialised bytes."""
        if self.view is None or len(self.view) < size:
            self.view = memoryview(np.empty(size, np.uint8))  # type: ignore[arg-type]
        return self.view


class _HostBlocks:
    """`BlockMemory` on the host: blocks are copied to their targets before the next read."""

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
    """Read, verify and place every block; stops at the first error."""
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
        in_threads(one, blocks, threads, fills=True)
    finally:
        blocks_of.finish()


def read_together(files: Files, wants: list[Want], peers: Group | None) -> None:
    """Fill every rank's wants, reading the store about once in all.  Collective; blocks.

    An error of any rank is raised on every rank; targets may then be partly overwritten.
    """
    with files.readers.kept():
        plan_together(files, wants, peers)()


def plan_together(files: Files, wants: list[Want], peers: Group | None) -> Callable[[], None]:
    """Return a function that fills every rank's wants.  Both are collective.

    This opens all files and verifies their digest tables, so foreseeable errors are raised before any
    target is overwritten.  Make both calls inside one `kept` block of `files.readers`: open files stay
    readable even if they are deleted.
    """
    if peers is None or peers.size == 1:
        return plan_alone(files, wants)
    from holdfast.core.checkpoint.sharing import plan_shared

    return plan_shared(files, wants, peers)


def read_alone(files: Files, wants: list[Want], threads: int | None = None) -> None:
    """Fill every want from the store, without other ranks.  Blocks."""
    with files.readers.kept():
        plan_alone(files, wants, threads)()


def plan_alone(files: Files, wants: list[Want], threads: int | None = None) -> Callable[[], None]:
    """Return a function that fills every want, without other ranks, as `plan_together`."""
    threads = threads or threads_for(files)
    with uncollected():
        indexes = group_rows(plan_rows(files.manifest, wants))
        blocks = blocks_of(files, indexes, needs(indexes, files.manifest.chunk_bytes))
    open_all(files, [index.file for index in indexes.values()], threads)
    return partial(run_blocks, files, blocks, indexes, threads)


def open_all(files: Files, wanted: list[FileEntry], threads: int) -> None:
    """Open files, up to `MOST_OPEN`, and check their lengths and digest tables."""
    tables = sum(f.bytes - f.table for f in wanted)
    if len(wanted) <= MOST_OPEN or (files.verify and tables <= TABLES_BYTES):
        in_threads(files.begin, wanted, threads)
