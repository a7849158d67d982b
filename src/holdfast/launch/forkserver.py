"""The fork server: a process with one thread that has imported torch, and forks the workers.

Python and torch take seconds to import, on each rank and at each restart.  A fork of a process that has
imported them takes some milliseconds, and shares their memory.  The server is itself a fork of the
launcher, made before any thread has begun (the threads of OpenBLAS and OpenMP handle forks themselves).

Launcher and server talk over a socket of packets: a `Start` with the worker's files, answered by `Started`;
and `Ended` as soon as a worker has ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from holdfast.base.errors import AgentError
from holdfast.base.wire import decode_json
from holdfast.launch.sockets import wait_readable

_PACKET_BYTES = 1 << 20
"""Largest packet; most of it is the environment of a worker."""
_FORK_S = 60.0
"""Seconds that a fork may take."""
_PR_SET_PDEATHSIG = 1
_CUDA_NOT_INITIALIZED = 3
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals upon which the launcher ends the workers.  The server ignores them: Slurm sends them to all
processes of a step, and workers need their server until they have saved."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """A worker to be forked.

    `environment`: its variables besides those of the server.  `stdout`, `stderr`: files to which it
    appends; empty: the streams of the launcher.
    """

    words: list[str]
    is_module: bool
    environment: dict[str, str]
    stdout: str
    stderr: str
    is_spare: bool


class Started(msgspec.Struct, frozen=True, tag=True):
    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A worker has ended; `status` as in `subprocess`: the exit status, or negative for a signal."""

    pid: int
    status: int


class ForkServer:
    """The launcher's side."""

    def __init__(self, handled: Iterable[str] = ()) -> None:
        """Fork the server.  In a forked worker this returns too, with its task in `worker`.

        `handled`: names of further signals upon which the launcher ends the workers.
        """
        begun = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
        if begun:
            raise AgentError(
                f"the fork server cannot begin: what was imported has begun threads ({', '.join(begun)})",
                hint="name fewer modules with --preload",
            )
        if cuda_has_begun():
            raise AgentError(
                "the fork server cannot begin: what was imported has begun to use CUDA",
                hint="name fewer modules with --preload",
            )
        self.worker: tuple[Start, socket.socket, int] | None = None
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, its):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PACKET_BYTES)
        launcher = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            self.worker = _serve(its, launcher, _ignored(handled))
        else:
            its.close()
            self._socket = ours
            self._ended: dict[int, int] = {}

    def start(self, worker: Start, channel: socket.socket, stacks: int) -> int:
        """Fork a worker with the other end of `channel` and the file `stacks`; return its pid.
        AgentError."""
        try:
            fds = [channel.fileno(), stacks]
            socket.send_fds(self._socket, [msgspec.json.encode(worker)], fds)
            while not isinstance(answer := self._receive(), Started):
                self._ended[answer.pid] = answer.status
        except OSError as error:
            raise self._gone(error) from error
        return answer.pid

    def ended(self) -> dict[int, int]:
        """Return the exit status of every worker that has ended since the last call, by pid.
        AgentError."""
        try:
            while wait_readable([self._socket]):
                answer = self._receive()
                if isinstance(answer, Ended):
                    self._ended[answer.pid] = answer.status
        except OSError as error:
            raise self._gone(error) from error
        ended, self._ended = self._ended, {}
        return ended

    def fileno(self) -> int:
        return self._socket.fileno()

    def _gone(self, error: OSError) -> AgentError:
        return AgentError(
            f"the fork server, process {self.pid}, from which all workers of this node are forked: {error}",
            hint="something has killed it, and the workers have ended with it; start the run again",
        )

    def _receive(self) -> Started | Ended:
        if not wait_readable([self._socket], _FORK_S):
            raise OSError(f"it has not answered for {_FORK_S:g} s")
        packet = self._socket.recv(_PACKET_BYTES)
        if not packet:
            raise OSError("it has ended")
        return decode_json(packet, Started | Ended)

    def close(self) -> None:
        """End the server and all its workers."""
        self._socket.close()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)  # it may be stopped
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def cuda_has_begun() -> bool:
    """Tell whether this process has initialised CUDA's driver: its forks could not use CUDA then."""
    try:
        if "libcuda.so" not in Path("/proc/self/maps").read_text():
            return False
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return bool(driver.cuDeviceGetCount(ctypes.byref(count)) != _CUDA_NOT_INITIALIZED)


def _ignored(names: Iterable[str]) -> set[signal.Signals]:
    """Return the signals that the server ignores; torch warns of unknown names."""
    known = {signal.Signals[name] for name in names if name in signal.Signals.__members__}
    return {*_ENDING, *known} - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}


def _serve(
    launcher: socket.socket, parent: int, ignored: Iterable[signal.Signals]
) -> tuple[Start, socket.socket, int]:
    """Serve until the launcher is gone.  Returns only in a forked worker, with its task."""
    _die_with(parent)
    os.setsid()  # Ctrl-C reaches the launcher, which ends the workers
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    wakes, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    workers: set[int] = set()
    while True:
        ready = wait_readable([launcher, wakes], None)
        if wakes in ready:
            with suppress(BlockingIOError):
                os.read(wakes, 4096)
            _tell_ended(launcher, workers)
        if launcher.fileno() in ready:
            packet, fds, _, _ = socket.recv_fds(launcher, _PACKET_BYTES, 2)
            if not packet:
                _end_all(workers)
            start, server = decode_json(packet, Start), os.getpid()
            if pid := os.fork():
                workers.add(pid)
                for fd in fds:
                    os.close(fd)
                launcher.send(msgspec.json.encode(Started(pid)))
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, handler in before.items():
                signal.signal(number, handler)
            for fd in (wakes, wake):
                os.close(fd)
            launcher.close()
            _die_with(server)
            return start, socket.socket(fileno=fds[0]), fds[1]


def _tell_ended(launcher: socket.socket, workers: set[int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        workers.discard(pid)
        with suppress(OSError):
            launcher.send(msgspec.json.encode(Ended(pid, os.waitstatus_to_exitcode(status))))


def _end_all(workers: Iterable[int]) -> None:
    """The launcher is gone: kill all workers and end the server."""
    for pid in workers:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, in whatever way."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent had ended before
        os._exit(1)
