"""The channel between a worker and its launcher: a socket of packets.

launcher                          worker
   ◄── Marked ───────────────────   the worker has reached its recoverable function
   ─── Enter(attempt, ranks) ────►  a spare, or a worker that has left, takes a rank
   ◄── Beat(attempt, step, ...) ─   the worker has done this step; number of complete saves
   ◄── Moved ────────────────────   no step for a while, but the worker is at another place in its code
   ─── Leave(attempt, ranks) ────►  a peer is lost: the worker cuts its connections and leaves the function
   ◄── Stuck(attempt) ───────────   the worker cannot leave: it waits in a collective that nothing ends
   ◄── Left(attempt, error) ─────   the worker left by this error, and has dropped its tensors and groups
   ◄── Done(attempt) ────────────   the function has returned
   ─── End ──────────────────────►  all workers are done, or the run is given up
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress

import msgspec

from holdfast.base.wire import decode_json

_PACKET_BYTES = 1 << 18
STACKS_BYTES = 1 << 20
TRACEBACK_CHARS = 64_000
"""Characters of a traceback that are sent."""


class Marked(msgspec.Struct, frozen=True, tag=True):
    pass


class Enter(msgspec.Struct, frozen=True, tag=True):
    """`stdout`, `stderr`: files of the rank, to which a spare appends from now on; empty: unchanged."""

    attempt: int
    environment: dict[str, str]
    stdout: str = ""
    stderr: str = ""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """`step`: the last step of this attempt, 0 before the first; `commits`: how many times a newer step was
    committed, in memory or in storage."""

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
    """`error` is the traceback, `kind` its last line; `is_own`: the worker left without a `Leave`."""

    attempt: int
    kind: str
    error: str
    is_own: bool
    step: int


class Done(msgspec.Struct, frozen=True, tag=True):
    attempt: int


class End(msgspec.Struct, frozen=True, tag=True):
    """`is_good`: all workers are done."""

    is_good: bool


FromWorker = Marked | Beat | Moved | Stuck | Left | Done
FromLauncher = Enter | Leave | End


class WorkerEnd:
    """The worker's end of the channel."""

    def __init__(self, channel: socket.socket, *, is_spare: bool) -> None:
        self.is_spare = is_spare
        self._channel = channel
        self._lock = threading.Lock()

    def say(self, message: FromWorker) -> None:
        """Send a message; blocks while the launcher is behind.  Does nothing if the launcher is gone: the
        kernel kills this process then."""
        with self._lock, suppress(OSError):
            self._channel.send(msgspec.json.encode(message))

    def hear(self) -> FromLauncher:
        """Block until the launcher says something."""
        packet = self._channel.recv(_PACKET_BYTES)
        return decode_json(packet, FromLauncher) if packet else End(False)


class LauncherEnd:
    """The launcher's end of the channel; no method blocks."""

    def __init__(self) -> None:
        self.stacks = os.memfd_create("holdfast-stacks", os.MFD_CLOEXEC)
        """The file to which the worker writes the stacks of its threads upon a signal."""
        self._socket, self.other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, self.other):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _PACKET_BYTES)
        self._socket.setblocking(False)

    def say(self, message: FromLauncher) -> bool:
        """Send a message; False if the worker cannot receive it."""
        try:
            self._socket.send(msgspec.json.encode(message))
        except OSError:
            return False
        return True

    def heard(self) -> list[FromWorker]:
        """Return the messages since the last call."""
        heard = []
        with suppress(OSError):
            while packet := self._socket.recv(_PACKET_BYTES):
                heard.append(decode_json(packet, FromWorker))
        return heard

    def stacks_size(self) -> int:
        """Return how many bytes of stacks the worker has written so far."""
        return os.fstat(self.stacks).st_size

    def stacks_since(self, start: int) -> str:
        """Return the stacks written after the first `start` bytes."""
        return os.pread(self.stacks, STACKS_BYTES, start).decode(errors="replace")

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()
        if self.stacks >= 0:
            os.close(self.stacks)
            self.stacks = -1
