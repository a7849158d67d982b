"""The training process's end of its writer: free slots out, records in, and what became of them.

    Queue ── put ──► WriterProcess ═ socket ═► writer ──► storage
      ▲                                            │
      └── slots that are free again ◄── RecordsWrote ──┘

A record stays in its slot, and in `_unwritten`, until the writer says that it is in storage.  So a writer
that dies loses nothing: another one is started, and is sent all records that its predecessor had.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from subprocess import TimeoutExpired

from holdfast.base.background import ending, spawn
from holdfast.base.errors import AgentError, Deadline, HoldfastError
from holdfast.base.events import emit, span
from holdfast.core.store import Store
from holdfast.live.saving.progress import TierProgress
from holdfast.tiers.records import messages as w
from holdfast.tiers.records.ring import Ring
from holdfast.tiers.records.segment import Record, SegmentHeader
from holdfast.tiers.records.writer_registry import announce, writing_key

MAX_RESTARTS = 3
"""Number of writers in a row that may die before they have written anything, and are replaced."""


_Data = tuple[memoryview, "int | None"]
"""Bytes for a writer, and a descriptor to send with them."""


class WriterProcess:
    """A writer that was started, and this end of the socket to it."""

    def __init__(self, order: w.Open, ring: Ring) -> None:
        """Start the process; `begin` sends it its `order` and the descriptor of the `ring`."""
        self.order = order
        self.ring = ring
        self.line, theirs = socket.socketpair()
        with theirs:
            self._process = spawn(
                "holdfast.tiers.records.writer",
                [str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
            )
        self.pid = self._process.pid
        self._has_order = False
        self._sending = threading.Condition()
        self._unsent: deque[_Data] | None = None
        """Bytes that a thread sends, as the writer did not take them at once."""

    def begin(self) -> None:
        """Send the writer its order.  If it is gone, the thread that listens to it finds out."""
        self._has_order = True
        # a copy of the descriptor, as the ring may be closed before it is sent
        self._send(w.framed(self.order), os.dup(self.ring.fd))

    def tell(self, message: object) -> None:
        """Send a message if the writer has its order; else `Queue._begin` sends it after the order."""
        if self._has_order:
            self._send(w.framed(message))

    def _send(self, data: bytes, fd: int | None = None) -> None:
        """Send the bytes that the writer takes at once, and leave the rest to a thread.

        The writer does not read while it waits for storage, and a caller that holds a lock must not wait.
        """
        with self._sending, suppress(OSError):
            if self._unsent is not None:
                self._unsent.append((memoryview(data), fd))
                return
            rest, fd = self._send_some(memoryview(data), fd, socket.MSG_DONTWAIT)
            if rest:
                self._unsent = deque([(rest, fd)])
                sender = threading.Thread(
                    target=self._send_rest, args=(self._unsent,), name="holdfast-send", daemon=True
                )
                try:
                    sender.start()
                except RuntimeError:  # the host has no more threads: another writer is to go on
                    self._unsent = None
                    _close([fd])
                    self.line.shutdown(socket.SHUT_RDWR)

    def _send_rest(self, unsent: deque[_Data]) -> None:
        """Send all unsent bytes in their order, until none are left or the writer is gone."""
        while True:
            with self._sending:
                if not unsent:
                    self._unsent = None
                    self._sending.notify_all()
                    return
                data = unsent.popleft()
            try:
                self._send_some(*data, 0)
            except OSError:
                with self._sending:
                    _close(fd for _, fd in unsent)
                    unsent.clear()

    def wait_sent(self) -> None:
        """Wait until the writer has taken all messages, or is gone.  Blocks without a limit."""
        with self._sending:
            self._sending.wait_for(lambda: self._unsent is None)

    def _send_some(self, data: memoryview, fd: int | None, flags: int) -> _Data:
        """Send bytes, with a descriptor if there is one, which is closed then; return what would block."""
        try:
            while data:
                fds = array("i", [] if fd is None else [fd])
                with_it = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else []
                n = self.line.sendmsg([data], with_it, flags)  # `send_fds` does not heed its flags
                _close([fd])
                data, fd = data[n:], None
        except BlockingIOError:
            pass
        except OSError:
            _close([fd])
            raise
        return data, fd

    def hang_up(self) -> None:
        """Close the socket: the writer writes what it has, and ends."""
        with suppress(OSError):
            self.line.shutdown(socket.SHUT_RDWR)
        self.line.close()

    def status(self, limit_s: float | None = None) -> int:
        """Wait until the writer has ended; return its status.  TimeoutExpired."""
        return self._process.wait(limit_s)


def _close(fds: Iterable[int | None]) -> None:
    for fd in fds:
        if fd is not None:
            os.close(fd)


_queues: weakref.WeakValueDictionary[int, Queue] = weakref.WeakValueDictionary()
"""The queues of this process, by pid of their writer; a queue lives as long as it listens to one."""


def hang_up_former(pids: Iterable[int]) -> None:
    """Have those of these writers end that this process started and left at work: a rank that hears of a
    lost rank leaves its code at any point, even in `Queue.close`."""
    for pid in pids:
        if (queue := _queues.get(pid)) is not None:
            queue.hang_up()


class Queue:
    """Records on their way to storage.  Thread-safe."""

    def __init__(
        self, store: Store, deadline_s: float, progress: TierProgress | None = None
    ) -> None:
        """`progress`: told what is written."""
        self.deadline_s = deadline_s
        self.error: HoldfastError | None = None
        """Why no record is written any more."""
        self._progress = progress or TierProgress()
        self._store = store
        self._changed = threading.Condition()
        self._writer: WriterProcess | None = None
        self._free: list[int] = []
        self._unwritten: dict[int, w.Put] = {}
        """Records that are not known to be in storage, by slot."""
        self._announced = 0
        """Pid of the writer that a restart finds announced; 0 if there is none."""
        self._flushing = False
        self._restarts = 0
        self._closing = False

    def open(self, header: SegmentHeader, ring: Ring, batch: int) -> None:
        """Have records with this header written from `ring`, after those that are on their way.

        The queue closes the ring.  Blocks; StoreError, and the errors of `flush`.
        """
        self.flush(self.deadline_s)
        with self._changed:
            self._free = list(range(ring.slots))
            order = w.Open(self._store.url, header, ring.slots, ring.slot_bytes, batch)
            writer = self._writer
            if writer is None:
                try:
                    writer = self._start(order, ring)
                except BaseException:
                    ring.close()  # nobody else does
                    raise
            else:
                writer.ring.close()
                writer.order, writer.ring = order, ring
            self._announce(writer)
            self._begin(writer)

    def take(self, *, wait: bool) -> int | None:
        """Take a free slot.  None if there is none and `wait` is off, or after an error.  Deadline."""
        with self._changed:
            if not self._free and wait and self.error is None:
                with span("delta.wait"):
                    self._changed.wait_for(lambda: self._free or self.error, self.deadline_s)
                if not self._free and self.error is None:
                    raise Deadline(
                        f"storage took no record for {self.deadline_s:g} s",
                        hint="it may hang; Delta(when_full='drop') does not wait for it",
                    )
            return self._free.pop(0) if self._free and self.error is None else None

    @property
    def is_empty(self) -> bool:
        """True if no record is on its way to storage."""
        with self._changed:
            return not self._unwritten

    def give_back(self, slot: int) -> None:
        """Take back a slot that holds no record."""
        with self._changed:
            self._free.append(slot)

    def put(self, slot: int, record: Record, leave_bytes: int = 0) -> None:
        """Hand the record in a slot to the writer.  Blocks until the writer, which outlives this process,
        has taken it.  `leave_bytes`: room that records leave on a local disk."""
        with self._changed:
            self._unwritten[slot] = put = w.Put(slot, record, leave_bytes)
            self._progress.begin(record.step)
            self._tell(put)
            writer = self._writer
        if writer is not None:
            writer.wait_sent()

    def flush(self, limit_s: float) -> None:
        """Wait until all that was put is in storage.  Deadline; the writer's error."""
        with self._changed:
            if self._writer is None:
                return
            self._flushing = True
            self._tell(w.Flush())
            done = self._changed.wait_for(lambda: not self._unwritten or self.error, limit_s)
            self._flushing = False
            if self.error is not None:
                raise self.error
            if not done:
                raise Deadline(f"records were still on their way to storage after {limit_s:g} s")

    def close(self, limit_s: float) -> None:
        """Have all records written, and end the writer.  Raises as `flush`."""
        until = time.monotonic() + limit_s
        try:
            if self.error is None:
                self.flush(limit_s)
        finally:
            writer = self.hang_up()
            if writer is not None:
                with suppress(TimeoutExpired):
                    writer.status(max(until - time.monotonic(), 1.0))
                writer.ring.close()

    def hang_up(self) -> WriterProcess | None:
        """Have the writer write its records and end; return it.  No other one is started any more."""
        with self._changed:
            self._closing = True
            if self._writer is not None:
                self._writer.hang_up()
            return self._writer

    # -- the writer -------------------------------------------------------------------------------

    def _start(self, order: w.Open, ring: Ring) -> WriterProcess:
        """Start a writer, without its order yet, and listen to it."""
        self._writer = writer = WriterProcess(order, ring)
        _queues[writer.pid] = self
        threading.Thread(
            target=self._listen, args=(writer,), name="holdfast-log", daemon=True
        ).start()
        return writer

    def _announce(self, writer: WriterProcess) -> None:
        """Announce this writer, for a restart to wait for, in place of the former one.  Blocks;
        StoreError."""
        before, pid, header = self._announced, writer.pid, writer.order.header
        if before != pid:
            announce(self._store, header.run, header.rank, pid)
            self._announced = pid
        if before not in (0, pid):
            with suppress(HoldfastError):
                self._store.delete(writing_key(header.run, header.rank, before))

    def _begin(self, writer: WriterProcess) -> None:
        """Send the writer its order, and all records that are not known to be written."""
        writer.begin()
        for put in sorted(self._unwritten.values(), key=lambda put: put.record.step):
            writer.tell(put)
        if self._flushing:  # the former writer may have died with this message
            writer.tell(w.Flush())

    def _tell(self, message: object) -> None:
        if self._writer is not None:
            self._writer.tell(message)

    def _listen(self, writer: WriterProcess) -> None:
        """Take the writer's messages until it is gone, and replace it then.  On a thread of its own."""
        while True:
            try:
                message, _ = w.receive(writer.line, w.RecordsWrote)
            except OSError:
                message = None
            if message is None:
                self._replace(writer)
                return
            with self._changed:
                self._wrote(message)
                self._changed.notify_all()

    def _wrote(self, message: w.RecordsWrote) -> None:
        if message.error is not None:
            self.error = message.error.error(step=self._unwritten[message.slots[0]].record.step)
            return
        self._restarts = 0
        for slot in message.slots:
            if (put := self._unwritten.pop(slot, None)) is not None:
                self._progress.leave(put.record.step)
            self._free.append(slot)
        self._progress.keep(message.last, message.seconds, message.bytes)
        emit(
            "delta.wrote", step=message.last, bytes=message.bytes, records=len(message.slots),
            seconds=round(message.seconds, 6), fixed_s=round(message.fixed_s, 6),
        )  # fmt: skip

    def _replace(self, dead: WriterProcess) -> None:
        """Have another writer go on for a dead one.  Waits for storage without the lock."""
        try:
            with self._changed:
                if self._closing:
                    return
                status = dead.status()
                self._restarts += 1
                if self._restarts > MAX_RESTARTS:
                    times = f"{MAX_RESTARTS} times: it {ending(status)}"
                    raise AgentError(f"the process that writes the log has died {times}")
                emit("delta.writer_died", status=status)
                writer = self._start(dead.order, dead.ring)
            self._announce(writer)
            with self._changed:
                if self._writer is writer and not self._closing:
                    self._begin(writer)
        except Exception as error:
            with self._changed:
                failure = AgentError(
                    f"the process that writes the log has died, and no other could be started: {error}"
                )
                self.error = error if isinstance(error, HoldfastError) else failure
                self._changed.notify_all()
