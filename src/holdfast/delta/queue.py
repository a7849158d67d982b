"""The training process's end of its writer: slots out, records in, and what became of them."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from contextlib import suppress

from holdfast.background import ending, spawn
from holdfast.delta import words as w
from holdfast.delta.ring import Ring
from holdfast.delta.segment import Record, SegmentHeader
from holdfast.delta.writers import announce, writing_key
from holdfast.errors import AgentError, Deadline, HoldfastError
from holdfast.events import emit, span
from holdfast.store import Store

MAX_RESTARTS = 3
"""Number of writers in a row that may be replaced, each dead before it had written anything."""


class Queue:
    """Records on their way to storage.  Thread-safe."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.ring: Ring | None = None
        self.written = 0
        """The last step that is in storage, on this rank."""
        self.error: HoldfastError | None = None
        """Why nothing is written any more."""
        self._changed = threading.Condition()
        self._free: list[int] = []
        self._sent: dict[int, Record] = {}
        self._store: Store | None = None
        self._order: w.Open | None = None
        self._line: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_told = False
        """True if the writer has its order."""
        self._announced = 0
        """Process number of the writer that restarts know of; 0 if there is none."""
        self._flushing = False
        self._restarts = 0
        self._closing = False

    def open(self, store: Store, header: SegmentHeader, ring: Ring, batch: int) -> None:
        """Write records of this kind from now on; what is on its way is written before.

        Blocks; StoreError, and as `flush`.
        """
        if self.ring is not None:
            self.flush(self.deadline_s)
        with self._changed:
            old, self.ring = self.ring, ring
            self._free = list(range(ring.slots))
            self._store = store
            self._order = w.Open(store.url, header, ring.slots, ring.slot_bytes, batch)
            try:
                line = self._start() if self._line is None else self._line
                self._announce()
                self._tell(line)
            finally:
                if old is not None:
                    old.close()

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

    def put(self, slot: int, record: Record) -> None:
        """Hand a filled slot to the writer."""
        with self._changed:
            self._sent[slot] = record
            self._say(w.Put(slot, record))

    def flush(self, limit_s: float) -> None:
        """Wait until all that was put is in storage.  Deadline; the writer's error."""
        with self._changed:
            if self._line is None:
                return
            self._flushing = True
            self._say(w.Flush())
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
            with self._changed:  # no other writer is started meanwhile
                self._closing = True
                if self._line is not None:
                    with suppress(OSError):
                        self._line.shutdown(socket.SHUT_RDWR)
                    self._line.close()
            if self._process is not None:
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(max(until - time.monotonic(), 1.0))
            if self.ring is not None:
                self.ring.close()

    # -- the process ------------------------------------------------------------------------------

    def _start(self) -> socket.socket:
        """Start a writer, which is told nothing yet; return the socket to it."""
        mine, theirs = socket.socketpair()
        with theirs:
            self._process = spawn(
                "holdfast.delta.writer",
                [str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
            )
        self._line, self._is_told = mine, False
        threading.Thread(
            target=self._listen, args=(mine,), name="holdfast-log", daemon=True
        ).start()
        return mine

    def _announce(self) -> None:
        """Have restarts wait for this writer, no more for the one before.  Blocks; StoreError."""
        assert self._order is not None and self._store is not None and self._process is not None
        before, pid, header = self._announced, self._process.pid, self._order.header
        if before != pid:
            announce(self._store, header.run, header.rank, pid)
            self._announced = pid
        if before not in (0, pid):
            with suppress(HoldfastError):
                self._store.delete(writing_key(header.run, header.rank, before))

    def _tell(self, line: socket.socket) -> None:
        """Send the writer its order, and all records that are not known to be written."""
        assert self._order is not None and self.ring is not None
        self._is_told = True
        with suppress(OSError):  # whoever listens finds that it is gone
            w.send(line, self._order, (self.ring.fd,))
        for slot, record in sorted(self._sent.items(), key=lambda item: item[1].step):
            self._say(w.Put(slot, record))
        if self._flushing:  # the one before may have died with that order
            self._say(w.Flush())

    def _say(self, message: object) -> None:
        """Send to a writer that has its order; another one will be told with it."""
        if self._is_told and self._line is not None:
            with suppress(OSError):
                w.send(self._line, message)

    def _listen(self, line: socket.socket) -> None:
        while True:
            try:
                message, _ = w.receive(line, w.FROM_WRITER)
            except OSError:
                message = None
            if message is None:
                self._replace()
                return
            with self._changed:
                if isinstance(message, w.RecordsWrote):
                    self._wrote(message)
                self._changed.notify_all()

    def _wrote(self, message: w.RecordsWrote) -> None:
        if message.error is not None:
            self.error = message.error.error(step=self._sent[message.slots[0]].step)
            return
        self._restarts = 0
        self.written = message.last
        for slot in message.slots:
            self._sent.pop(slot, None)
            self._free.append(slot)
        emit(
            "delta.wrote", step=message.last, bytes=message.bytes, records=len(message.slots),
            seconds=round(message.seconds, 6), fixed_s=round(message.fixed_s, 6),
        )  # fmt: skip

    def _replace(self) -> None:
        """The writer is gone: another one goes on.  Storage is waited for without holding anybody up."""
        try:
            with self._changed:
                if self._closing:
                    return
                status = self._process.wait() if self._process is not None else 0
                self._restarts += 1
                if self._restarts > MAX_RESTARTS:
                    times = f"{MAX_RESTARTS} times: it {ending(status)}"
                    raise AgentError(f"the process that writes the log has died {times}")
                emit("delta.writer_died", status=status)
                line = self._start()
            self._announce()
            with self._changed:
                if self._line is line and not self._closing:
                    self._tell(line)
        except Exception as error:
            with self._changed:
                no_other = AgentError(
                    f"the process that writes the log has died, and no other: {error}"
                )
                self.error = error if isinstance(error, HoldfastError) else no_other
                self._changed.notify_all()
