"""The writer: a process of its own for each rank, which writes records to storage.  Torch-free.

It outlives the training process: it writes the records that lie in the ring when that dies, and ends then.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from holdfast.base.background import weigh_session, yield_to_training
from holdfast.base.errors import Exists, OutOfSpace
from holdfast.base.sizes import size_text
from holdfast.base.wire import WireError
from holdfast.core.codec.digest import CHUNK_BYTES, digest_chunks, hexdigest, num_chunks
from holdfast.core.format.image import ALIGN
from holdfast.core.store import LocalStore, Store, Writer, be_patient, open_store
from holdfast.core.store.contract import check_blocks
from holdfast.tiers.records import messages as w
from holdfast.tiers.records.ring import Ring
from holdfast.tiers.records.segment import (
    Record,
    SegmentHeader,
    aligned,
    encode_header,
    read_header,
    segment_key,
)
from holdfast.tiers.records.writer_registry import withdraw

WRITE_BYTES = 8 << 20
PAUSES_S = (0.1, 1.0, 5.0)
"""Seconds before each further try to write a segment, once the training process is gone."""


class SegmentWriter:
    """Writes records of one order, which lie in slots of a ring, as segments to storage."""

    def __init__(self, store: Store, order: w.Open, ring: Ring) -> None:
        self.store = store
        self.order = order
        self.ring = ring

    def digested(self, put: w.Put) -> w.Put:
        """Add the digests of its chunks to the image in a slot; return the record with their digest."""
        view, record = self.ring.slot(put.slot), put.record
        digests = [0] * num_chunks(record.table, CHUNK_BYTES)
        digest_chunks(view[: record.table], digests)
        table = struct.pack(f"<{len(digests)}Q", *digests)
        view[record.table : record.bytes] = table
        done = msgspec.structs.replace(record, digest=hexdigest(table))
        return msgspec.structs.replace(put, record=done)

    def write(self, batch: list[w.Put]) -> tuple[int, float]:
        """Write a segment; return its bytes, and the seconds to open and finish the file."""
        at, records = 0, []
        for put in batch:
            records.append(msgspec.structs.replace(put.record, at=at))
            at += aligned(put.record.bytes)
        header = msgspec.structs.replace(self.order.header, records=tuple(records))
        head = encode_header(header)
        key = segment_key(header.run, records[0].step, records[-1].step, header.rank)
        size = len(head) + at
        began = time.monotonic()
        file = self.store.create(key, size)
        opened = time.monotonic()
        written = opened
        try:
            check_blocks(file, key, ALIGN, "keep records on a file system")
            file.write(0, memoryview(head))
            for put, record in zip(batch, records):
                self._image(file, len(head) + record.at, self.ring.slot(put.slot), record)
            written = time.monotonic()
            file.finish()
        except Exists:
            file.abort()
            self._check_same(key, header)
        except BaseException:
            file.abort()
            raise
        return size, opened - began + time.monotonic() - written

    def check_room(self, batch: list[w.Put]) -> None:
        """OutOfSpace if all ranks' records of this size would take the room for the next full save."""
        leave = max(put.leave_bytes for put in batch)
        if not leave or not isinstance(self.store, LocalStore):
            return
        free, size = self.store.free_bytes(), sum(aligned(put.record.bytes) for put in batch)
        if free is not None and free - size * self.order.header.world < leave:
            raise OutOfSpace(
                f"{size_text(free)} are free in {self.store.url}: records leave room for the next full "
                f"save, {size_text(leave)}",
                hint="free space; records begin again with the next full save",
            )

    def _check_same(self, key: str, header: SegmentHeader) -> None:
        """Accept a segment that a former writer wrote before it died; Exists if it has another header."""
        reader = self.store.open(key)
        try:
            found, _ = read_header(reader, key)
        finally:
            reader.close()
        if found != header:
            raise Exists("another record of this run and step is there already", key=key)

    @staticmethod
    def _image(file: Writer, at: int, view: memoryview, record: Record) -> None:
        size = aligned(record.bytes)
        view[record.bytes : size] = bytes(size - record.bytes)
        for start in range(0, size, WRITE_BYTES):
            stop = min(start + WRITE_BYTES, size)
            file.write(at + start, view[start:stop])


class RecordWriter:
    """Collects records and writes them in batches.  `parent`: the training process."""

    def __init__(self, line: socket.socket, parent: int) -> None:
        self._line = line
        self._parent: list[int] = []
        with suppress(OSError):  # an old kernel: then only the socket shows that it is gone
            self._parent = [os.pidfd_open(parent)]
        self._is_orphan = os.getppid() != parent
        """True if the training process died before this one had begun."""
        self._alone = False
        """True once the training process was found to be gone, or to listen no more."""

    def run(self) -> None:
        """Write records until the training process closes its end, or dies."""
        store: Store | None = None
        message, fd = self._next()
        while isinstance(message, w.Open) and fd is not None:
            if store is None or store.url != message.root:
                store = open_store(message.root)
                # without a limit: no one waits for this process, and its records are lost with it
                be_patient(store, None)
            ring = Ring(message.slots, message.slot_bytes, fd)
            order, (message, fd) = message, self._serve(SegmentWriter(store, message, ring))
            ring.close()
            if message is None:
                withdraw(store, order.header.run, order.header.rank)

    def _serve(self, segments: SegmentWriter) -> tuple[object, int | None]:
        """Write records of one order; return the message after them: the next order, or None."""
        batch: list[w.Put] = []
        while True:
            message, fd = self._next()
            match message:
                case w.Put():
                    batch.append(segments.digested(message))
                    if len(batch) >= segments.order.batch:
                        self._write(segments, batch)
                        batch = []
                case w.Flush():
                    self._write(segments, batch)
                    batch = []
                case _:
                    if message is None:
                        self._alone = True
                        weigh_session(0)  # the next attempt waits for the records that are left
                    self._write(segments, batch)
                    return message, fd

    def _next(self) -> tuple[object, int | None]:
        """The next message; None when the training process is gone, even if another has its socket."""
        try:
            here = self._line.fileno()
            limit_s = 0 if self._is_orphan else None
            ready, _, _ = select.select([here, *self._parent], [], [], limit_s)
            if here not in ready:
                return None, None
            return w.receive(self._line, w.TO_WRITER)
        except OSError:
            return None, None

    def _write(self, segments: SegmentWriter, batch: list[w.Put]) -> None:
        """Write the batch as one segment, if there is any; report that, or the error."""
        if not batch:
            return
        began = time.monotonic()
        slots = tuple(put.slot for put in batch)
        try:
            if not self._is_alone():  # else no full save will follow that needs the room
                segments.check_room(batch)
            size, fixed_s = self._persist(segments, batch)
        except Exception as error:
            failure = WireError.of(error)
            self._say(w.RecordsWrote(slots, error=failure))
            if self._is_alone():
                steps = f"{batch[0].record.step} to {batch[-1].record.step}"
                with suppress(OSError):  # the reader of stderr may be gone, too
                    print(
                        f"holdfast: the records of steps {steps} are lost: {failure.message}",
                        file=sys.stderr,
                    )
            return
        took = time.monotonic() - began
        self._say(w.RecordsWrote(slots, batch[-1].record.step, size, took, fixed_s))

    def _persist(self, segments: SegmentWriter, batch: list[w.Put]) -> tuple[int, float]:
        """Write a segment.  Once the training process is gone, which would make a full save after an error,
        try again."""
        for pause_s in PAUSES_S:
            try:
                return segments.write(batch)
            except Exception:
                if not self._is_alone():
                    raise
                time.sleep(pause_s)
        return segments.write(batch)

    def _is_alone(self) -> bool:
        """True if the training process is gone, or listens no more."""
        if not self._alone:
            gone, _, _ = select.select(self._parent, [], [], 0)
            self._alone = self._is_orphan or bool(gone)
        return self._alone

    def _say(self, message: object) -> None:
        if self._alone:
            return
        try:
            w.send(self._line, message)
        except OSError:
            self._alone = True


def main() -> int:
    yield_to_training()
    Path("/proc/self/comm").write_text("holdfast-writer")
    line, parent = map(int, sys.argv[1:3])
    RecordWriter(socket.socket(fileno=line), parent).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
