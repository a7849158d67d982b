"""The channel between a worker and its launcher: a socket of packets.

launcher                          worker
   ◄── Marked ───────────────────   it has come to its recoverable function
   ─── Enter(attempt, ranks) ────►  a spare, or one that has left, takes a rank
   ◄── Beat(attempt, step, ...) ─   it has done that step; so many saves are complete
   ◄── Moved ────────────────────   it has not, for a while, but is at something else than before
   ─── Leave(attempt, ranks) ────►  a peer is lost: it cuts its connections, and leaves the function
   ◄── Stuck(attempt) ───────────   it cannot: it waits in a collective that nothing ends
   ◄── Left(attempt, error) ─────   it is out, by this error, and holds nothing any more
   ◄── Done(attempt) ────────────   the function has returned
   ─── End ──────────────────────►  all are done, or the run is given up
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress

import msgspec

from holdfast.base.wire import decode_json

PACKET = 1 << 18
STACKS_BYTES = 1 << 20
LONGEST = 64_000
"""Characters of a traceback that are told."""


class Marked(msgspec.Struct, frozen=True, tag=True):
    pass


class Enter(msgspec.Struct, frozen=True, tag=True):
    """`stdout`, `stderr`: files of the rank, to which a spare appends from now on; empty: as before."""

    attempt: int
    environment: dict[str, str]
    stdout: str = ""
    stderr: str = ""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """`step`: the last that was done in this attempt, 0 before the first; `commits`: how many times a newer
    step was complete, in memory or in storage."""

    attempt: int
    step: int
    commits: int = 0


class Moved(msgspec.Struct, frozen=True, tag=True):
    pass


class Leave(msgspec.Struct, frozen=True, tag=True):
    """`pids`: the processes of the other ranks of this node; `hosts`: addresses of all nodes."""

    attempt: int
    pids: list[int]
    hosts: list[str]


class Stuck(msgspec.Struct, frozen=True, tag=True):
    attempt: int


class Left(msgspec.Struct, frozen=True, tag=True):
    """`error` is the traceback, `kind` its last line; `is_own`: it was not the launcher's word."""

    attempt: int
    kind: str
    error: str
    is_own: bool
    step: int


class Done(msgspec.Struct, frozen=True, tag=True):
    attempt: int


class End(msgspec.Struct, frozen=True, tag=True):
    """`is_good`: all are done."""

    is_good: bool


FromWorker = Marked | Beat | Moved | Stuck | Left | Done
FromLauncher = Enter | Leave | End


class WorkerEnd:
    """The worker's end of it."""

    def __init__(self, channel: socket.socket, *, is_spare: bool) -> None:
        self.is_spare = is_spare
        self._channel = channel
        self._lock = threading.Lock()

    def say(self, message: FromWorker) -> None:
        """Blocks while the launcher is behind.  Nothing, if it is gone: so is this process, soon."""
        with self._lock, suppress(OSError):
            self._channel.send(msgspec.json.encode(message))

    def hear(self) -> FromLauncher:
        """Blocks until the launcher says something."""
        packet = self._channel.recv(PACKET)
        return decode_json(packet, FromLauncher) if packet else End(False)


class LauncherEnd:
    """The launcher's end of it; nothing blocks."""

    def __init__(self) -> None:
        self.stacks = os.memfd_create("holdfast-stacks", os.MFD_CLOEXEC)
        """A file to which the worker writes the stacks of its threads when it is asked for them."""
        self._socket, self.other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, self.other):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * PACKET)
        self._socket.setblocking(False)

    def say(self, message: FromLauncher) -> bool:
        """True if the worker will hear of it."""
        try:
            self._socket.send(msgspec.json.encode(message))
        except OSError:
            return False
        return True

    def heard(self) -> list[FromWorker]:
        """Return what the worker has said since."""
        heard = []
        with suppress(OSError):
            while packet := self._socket.recv(PACKET):
                heard.append(decode_json(packet, FromWorker))
        return heard

    def stacks_size(self) -> int:
        """Return how many bytes of stacks it has written so far."""
        return os.fstat(self.stacks).st_size

    def stacks_since(self, start: int) -> str:
        """Return the stacks that it has written after the first `start` bytes."""
        return os.pread(self.stacks, STACKS_BYTES, start).decode(errors="replace")

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()
        if self.stacks >= 0:
            os.close(self.stacks)
            self.stacks = -1
