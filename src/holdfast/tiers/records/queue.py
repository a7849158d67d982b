"""The training process's end of its writer: free slots out, records in, and what became of them.

    Queue ── put ──► WriterProcess ═ socket ═► writer ──► storage
      ▲                                            │
      └── slots that are free again ◄── RecordsWrote ──┘

A record stays in its slot, and in `_sent`, until the writer says that it is in storage.  So a writer that
dies loses nothing: another one is started, and is sent all that its predecessor had.
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
from holdfast.tiers.records import messages as w
from holdfast.tiers.records.ring import Ring
from holdfast.tiers.records.segment import Record, SegmentHeader
from holdfast.tiers.records.writer_registry import announce, writing_key

MAX_RESTARTS = 3
"""Number of writers in a row that may be replaced, each dead before it had written anything."""


_Data = tuple[memoryview, "int | None"]
"""Bytes for a writer, and a descriptor that goes with them."""


class WriterProcess:
    """A writer that was started, and this end of the socket to it."""

    def __init__(self, order: w.Open, ring: Ring) -> None:
        """Start it; it is told its `order`, with the memory of the `ring`, by `begin`."""
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
        """Bytes that a thread of their own sends, for the writer did not take them at once."""

    def begin(self) -> None:
        """Send its order.  Whoever listens to it finds that it is gone, if it is."""
        self._has_order = True
        self._send(
            w.framed(self.order), os.dup(self.ring.fd)
        )  # the ring may be closed before it is sent

    def tell(self, message: object) -> None:
        """Send a message, if it has its order; else whoever sends the order sends this, too."""
        if self._has_order:
            self._send(w.framed(message))

    def _send(self, data: bytes, fd: int | None = None) -> None:
        """Send bytes, at once as far as the writer takes them: it does not read while it waits for storage,
        and who holds a lock is not to wait for it."""
        with self._sending, suppress(OSError):
            if self._unsent is not None:
                self._unsent.append((memoryview(data), fd))
                return
            rest, fd = self._sent(memoryview(data), fd, socket.MSG_DONTWAIT)
            if rest:
                self._unsent = deque([(rest, fd)])
                threading.Thread(
                    target=self._send_rest, args=(self._unsent,), name="holdfast-send", daemon=True
                ).start()

    def _send_rest(self, unsent: deque[_Data]) -> None:
        """Send what is unsent, in its order, until there is nothing left or the writer is gone."""
        while True:
            with self._sending:
                if not unsent:
                    self._unsent = None
                    self._sending.notify_all()
                    return
                data = unsent.popleft()
            try:
                self._sent(*data, 0)
            except OSError:
                with self._sending:
                    _close(fd for _, fd in unsent)
                    unsent.clear()

    def wait_sent(self) -> None:
        """Wait until it has taken all that it was told, or is gone.  Blocks without a limit."""
        with self._sending:
            self._sending.wait_for(lambda: self._unsent is None)

    def _sent(self, data: memoryview, fd: int | None, flags: int) -> _Data:
        """Send bytes, the first with a descriptor, if any, which is closed; return what would block."""
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
        """Wait until it has ended; return its status.  TimeoutExpired."""
        return self._process.wait(limit_s)


def _close(fds: Iterable[int | None]) -> None:
    for fd in fds:
        if fd is not None:
            os.close(fd)


_queues: weakref.WeakValueDictionary[int, Queue] = weakref.WeakValueDictionary()
"""Those of this process, by number of their writer.  One that listens to a writer lives."""


def hang_up_former(pids: Iterable[int]) -> None:
    """Have writers of this process end that it has left at work: a rank that is told of a lost one leaves
    wherever it is, also in the middle of `Queue.close`."""
    for pid in pids:
        if (queue := _queues.get(pid)) is not None:
            queue.hang_up()


class Queue:
    """Records on their way to storage.  Thread-safe."""

    def __init__(self, store: Store, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.error: HoldfastError | None = None
        """Why nothing is written any more."""
        self._store = store
        self._changed = threading.Condition()
        self._writer: WriterProcess | None = None
        self._free: list[int] = []
        self._sent: dict[int, w.Put] = {}
        """Records that are not known to be in storage, by slot."""
        self._announced = 0
        """Process number of the writer that restarts know of; 0 if there is none."""
        self._flushing = False
        self._restarts = 0
        self._closing = False

    def open(self, header: SegmentHeader, ring: Ring, batch: int) -> None:
        """Write records of this kind, which lie in `ring`, after what is on its way.

        Blocks; StoreError, and as `flush`.
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
        """A free slot.  None if there is none and `wait` is off, or nothing is written any more."""
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
        """True if nothing is on its way to storage."""
        with self._changed:
            return not self._sent

    def give_back(self, slot: int) -> None:
        """Take back a slot that holds nothing."""
        with self._changed:
            self._free.append(slot)

    def put(self, slot: int, record: Record, leave_bytes: int = 0) -> None:
        """Hand a filled slot to the writer.  Blocks until it has taken it: it outlives this process.
        `leave_bytes`: room that records leave on a local disk."""
        with self._changed:
            self._sent[slot] = put = w.Put(slot, record, leave_bytes)
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
            done = self._changed.wait_for(lambda: not self._sent or self.error, limit_s)
            self._flushing = False
            if self.error is not None:
                raise self.error
            if not done:
                raise Deadline(f"records were still on their way to storage after {limit_s:g} s")

    def close(self, limit_s: float) -> None:
        """Write what there is, and end the writer."""
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
        """Have the writer write what it has, and end; return it.  No other one is started any more."""
        with self._changed:
            self._closing = True
            if self._writer is not None:
                self._writer.hang_up()
            return self._writer

    # -- the writer -------------------------------------------------------------------------------

    def _start(self, order: w.Open, ring: Ring) -> WriterProcess:
        """Start a writer, which is told nothing yet, and listen to it."""
        self._writer = writer = WriterProcess(order, ring)
        _queues[writer.pid] = self
        threading.Thread(
            target=self._listen, args=(writer,), name="holdfast-log", daemon=True
        ).start()
        return writer

    def _announce(self, writer: WriterProcess) -> None:
        """Have restarts wait for this writer, no more for the one before.  Blocks; StoreError."""
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
        for put in sorted(self._sent.values(), key=lambda put: put.record.step):
            writer.tell(put)
        if self._flushing:  # the one before may have died with that order
            writer.tell(w.Flush())

    def _tell(self, message: object) -> None:
        if self._writer is not None:
            self._writer.tell(message)

    def _listen(self, writer: WriterProcess) -> None:
        """Take what the writer says, on a thread of its own, until it is gone."""
        while True:
            try:
                message, _ = w.receive(writer.line, w.FROM_WRITER)
            except OSError:
                message = None
            if message is None:
                self._replace(writer)
                return
            with self._changed:
                if isinstance(message, w.RecordsWrote):
                    self._wrote(message)
                self._changed.notify_all()

    def _wrote(self, message: w.RecordsWrote) -> None:
        if message.error is not None:
            self.error = message.error.error(step=self._sent[message.slots[0]].record.step)
            return
        self._restarts = 0
        for slot in message.slots:
            self._sent.pop(slot, None)
            self._free.append(slot)
        emit(
            "delta.wrote", step=message.last, bytes=message.bytes, records=len(message.slots),
            seconds=round(message.seconds, 6), fixed_s=round(message.fixed_s, 6),
        )  # fmt: skip

    def _replace(self, dead: WriterProcess) -> None:
        """The writer is gone: another one goes on.  Storage is waited for without holding anybody up."""
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
                no_other = AgentError(
                    f"the process that writes the log has died, and no other: {error}"
                )
                self.error = error if isinstance(error, HoldfastError) else no_other
                self._changed.notify_all()
