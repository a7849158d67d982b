"""Writing an image: digests and storage, block by block, as the copier fills it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from holdfast.base.events import count
from holdfast.base.threads import in_threads
from holdfast.core.checkpoint.names import step_prefix
from holdfast.core.codec.digest import CHUNK_BYTES, digest_chunks, hexdigest, num_chunks
from holdfast.core.format.image import Image
from holdfast.core.format.manifest import FileEntry
from holdfast.core.store import Store, Writer
from holdfast.core.store.contract import part_bytes
from holdfast.live.state.snapshot import FillProgress

WRITE_BYTES = 8 << 20
"""Bytes of a part of a file, unless the store takes only larger ones (`Writer.block_bytes`)."""

WRITE_THREADS = 4


class Blocks(Protocol):
    """Bytes of an image, block by block.  Several threads call it."""

    def block(self, start: int, stop: int) -> memoryview:
        """Return bytes `start..stop`, which end before the digest table.  Blocks until they are filled."""

    def last(self, start: int, table: bytes) -> memoryview:
        """Return the bytes from `start` to the end, with the table.  Raises if the image has failed."""


@dataclass(frozen=True)
class ImageToFill:
    """An image in memory that is being filled."""

    memory: memoryview
    image: Image
    filling: FillProgress
    check: Callable[[], None]
    """Called before each block; raises when the image is no longer needed."""

    def block(self, start: int, stop: int) -> memoryview:
        """Wait for the copier."""
        self.filling.wait(stop)
        self.check()
        return self.memory[start:stop]

    def last(self, start: int, table: bytes) -> memoryview:
        """Wait until the whole image is proved to be of one moment."""
        self.filling.conclude()
        self.memory[self.image.table_start : self.image.total_bytes] = table
        return self.memory[start : self.image.total_bytes]


def write_blocks(
    store: Store, step: int, path: str, rank: int, image: Image, blocks: Blocks
) -> FileEntry:
    """Digest and write an image, as `path` below a step's folder, block by block.  Blocks until it is
    durable; after an error nothing is left."""
    writer = store.create(step_prefix(step) + path, image.total_bytes)
    try:
        table = _stream(writer, image, blocks)
        writer.finish()
    except BaseException:
        writer.abort()
        raise
    return FileEntry(
        rank,
        path,
        image.total_bytes,
        image.data_start,
        image.extras_start,
        image.table_start,
        hexdigest(table),
    )


def _stream(writer: Writer, image: Image, blocks: Blocks) -> bytes:
    """Write every block as soon as it is filled, the digest table last; return the table."""
    table = np.empty(num_chunks(image.table_start), "<u8")
    part = part_bytes(writer, WRITE_BYTES)
    last = image.table_start // part * part

    def one(start: int) -> None:
        stop = min(start + part, image.table_start)
        view = blocks.block(start, stop)
        first = start // CHUNK_BYTES
        digest_chunks(view, table[first : first + num_chunks(len(view))])
        if start < last:
            writer.write(start, view)
            count("written.bytes", len(view))

    in_threads(one, list(range(0, image.table_start, part)), WRITE_THREADS)
    writer.write(last, blocks.last(last, table.tobytes()))
    count("written.bytes", image.total_bytes - last)
    return table.tobytes()
