"""A server as a process of its own, which ends with the tests whatever ends them.

server = Process([sys.executable, "-m", "http.server", "8000"], log=tmp_path / "log")
server.start()
await_answer("http://127.0.0.1:8000/", server, within_s=10)
server.kill()                          # SIGKILL: as a crash of the machine, but for its page cache
server.start()                         # again, on what it had written
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import final

BOUND = """
import ctypes, os, sys
parent = int(sys.argv[1])
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() == parent:
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Runs the rest of its arguments as a program that is killed when the process of the first one ends."""

END_S = 30.0
_STARTER = ThreadPoolExecutor(1)
"""A child is killed when the thread ends that has started it: this one ends with the process."""


@final
class Process:
    """One server process at a time; all of them write to one log."""

    def __init__(
        self, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.command = list(command)
        self.log = log
        self.env = env
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was never started"
        return self._process.pid

    def start(self) -> None:
        """Start it; whether it answers is another question."""
        assert not self.is_alive, "the server runs already"
        self._process = _STARTER.submit(self._begin).result()

    def _begin(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-S", "-c", BOUND, str(os.getpid()), *self.command],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for pytest, which ends the server in its turn
            )

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone.  Fine if it is gone already."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(END_S)

    def tail(self, num_chars: int = 4000) -> str:
        """The end of the log, for the message of a failure."""
        return self.log.read_text(errors="replace")[-num_chars:] if self.log.exists() else ""


def await_true(condition: Callable[[], bool], what: str, process: Process, within_s: float) -> None:
    """Wait for a condition; an AssertionError with the server's log if it does not come."""
    until = time.monotonic() + within_s
    while not condition():
        assert process.is_alive, f"the server ended before {what}\n{process.tail()}"
        assert time.monotonic() < until, f"no {what} within {within_s} s\n{process.tail()}"
        time.sleep(0.02)


def await_answer(url: str, process: Process, within_s: float) -> None:
    """Wait until a server answers HTTP at `url`, with whatever status."""

    def answers() -> bool:
        try:
            urllib.request.urlopen(url, timeout=1).close()
        except urllib.error.HTTPError as answer:
            answer.close()
        except OSError:
            return False
        return True

    await_true(answers, f"answer at {url}", process, within_s)
