"""Writing an image: digests and storage, block by block, as the copier fills it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from holdfast.checkpoint.names import step_prefix
from holdfast.codec.digest import CHUNK_BYTES, digest_chunks, hexdigest, num_chunks
from holdfast.events import count
from holdfast.format.image import Image
from holdfast.format.manifest import FileEntry
from holdfast.state.snapshot import Filling, Refilled
from holdfast.store import Store, Writer
from holdfast.store.contract import part_bytes
from holdfast.threads import in_threads

WRITE_BYTES = 8 << 20
"""Bytes of a part of a file, unless the store takes only larger ones (`Writer.block_bytes`)."""

WRITE_THREADS = 4


def write_image(
    store: Store,
    step: int,
    path: str,
    rank: int,
    view: memoryview,
    image: Image,
    filling: Filling,
    check: Callable[[], None],
) -> FileEntry:
    """Digest and write an image while it is being filled, as `path` below a step's folder.

    Begins anew when the image is filled anew.  Ends with what `check` raises, before each block: why this
    image is of no use any more.
    """
    while True:
        writer = store.create(step_prefix(step) + path, image.total_bytes)
        try:
            table = _stream(writer, view, image, filling, check)
            writer.finish()
            break
        except Refilled:
            writer.abort()
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


def _stream(
    writer: Writer, memory: memoryview, image: Image, filling: Filling, check: Callable[[], None]
) -> bytes:
    """Write every block as soon as it is filled, the digest table last; returns the table."""
    turn = filling.turn
    table = np.empty(num_chunks(image.table_start), "<u8")
    part = part_bytes(writer, WRITE_BYTES)
    last = image.table_start // part * part

    def one(start: int) -> None:
        stop = min(start + part, image.table_start)
        filling.wait(stop, turn)
        check()
        view = memory[start:stop]
        first = start // CHUNK_BYTES
        digest_chunks(view, table[first : first + num_chunks(len(view))])
        if start < last:
            writer.write(start, view)
            count("written.bytes", len(view))

    in_threads(one, list(range(0, image.table_start, part)), WRITE_THREADS)
    filling.settle(turn)
    memory[image.table_start : image.total_bytes] = table.tobytes()
    writer.write(last, memory[last : image.total_bytes])
    count("written.bytes", image.total_bytes - last)
    return table.tobytes()
