"""Talking to the agent of this node; starting it where there is none."""

from __future__ import annotations

import http.client
import importlib.util
import os
import select
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from holdfast.base.background import ending, spawn
from holdfast.base.errors import AgentUnreachable, UsageError
from holdfast.base.events import emit
from holdfast.base.host import process_state
from holdfast.base.wire import decode_error, decode_msgpack
from holdfast.core.store.oserrors import translated
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.home import SOCKET, check_home, home, last_agent, make_home

START_S = 60.0
"""Seconds for which a new agent is waited for: on a busy node it may take half a minute to begin."""
RESTART_S = 1.0
"""Seconds after which an agent is started again.  One that finds another ends at once; if nobody answers
then, the other has ended, too."""
HURRIED_S = 1.0
"""Most seconds that a call may take once this process comes to its end."""
LOOK_S, SILENT_S = 15.0, 5.0
"""Seconds between checks that the agent still answers, while a call waits for it, and seconds that
each of a check's two looks may take."""
AGAIN_S, MOST_AGAIN_S = 60.0, 900.0
"""Seconds for which a silent agent is left alone, at first and at most."""
Presence = Literal["there", "silent", "nobody"]
LONG = (w.Persist, w.Protect)
"""Orders that take as long as storage and other nodes do: the limit is on the time without
progress."""
_T = TypeVar("_T")
_Answer = dict[str, msgspec.Raw]
"""`ok`, with what was asked for, or the fields of an error."""


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))

    def hang_up(self) -> None:
        """Wake whoever waits for an answer; from any thread."""
        sock = self.sock
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class Client:
    """One process's connection to its node's agent.  Thread-safe; every call has a deadline."""

    def __init__(self, root: Path | None = None, deadline_s: float = 600.0) -> None:
        self.root = root or home()
        self.deadline_s = deadline_s
        self._lock = threading.Lock()
        self._open: set[_Connection] = set()
        self.leaving = False
        """True once this process comes to its end."""
        self._silent_s = 0.0
        """Seconds for which an agent that was silent is left alone; 0: it was not silent."""
        self._again_at = 0.0
        self._has_answered = False

    def abort_waits(self) -> None:
        """End every call under way with AgentUnreachable, and later ones after a second."""
        with self._lock:
            self.leaving = True
            for line in self._open:
                line.hang_up()

    def ask(self, message: w.Message, kind: type[_T] | Any = Any, timeout_s: float = 0.0) -> Any:
        """Return the answer, as `kind`.  Raises the error that the agent answers with, or AgentUnreachable.

        AgentUnreachable comes at once if the agent was silent lately.  An order that is `LONG` is
        waited for as long as it makes progress.
        """
        limit = timeout_s or self.deadline_s
        if self._is_waiting():
            raise self.silence()
        try:
            body = self._ask(message, limit)
        except TimeoutError:
            what = "got no further for" if isinstance(message, LONG) else "did not answer within"
            raise AgentUnreachable(
                f"the agent of this node {what} {limit:g} s",
                hint=f"its log is {self.root}/agent.log",
            ) from None
        except BlockingIOError:
            raise self.silence() from None
        answer = decode_msgpack(body, _Answer)
        if "error" in answer:
            raise decode_error(body)
        return decode_msgpack(answer["ok"], kind)

    def _ask(self, message: w.Message, limit: float) -> bytes:
        """Return the encoded answer.  TimeoutError, BlockingIOError, AgentUnreachable."""
        with self._lock:
            limit = min(limit, HURRIED_S) if self.leaving else limit
            line = _Connection(self.root / SOCKET, limit)
            self._open.add(line)
        try:
            check_home(self.root)
            line.request("POST", "/", w.encode(message))
            self._await_answer(message, line.sock, limit)
            response = line.getresponse()
            status, body = response.status, response.read()
        except (TimeoutError, BlockingIOError):
            raise
        except (OSError, http.client.HTTPException) as error:
            if self.leaving:
                text = "the agent of this node had not answered when this process came to its end"
                raise AgentUnreachable(text) from None
            raise AgentUnreachable(
                f"the agent of this node cannot be reached: {type(error).__name__}: {error}",
                hint=f"its log is {self.root}/agent.log; the next save or restart starts another",
            ) from None
        finally:
            with self._lock:
                self._open.discard(line)
            line.close()
        if status != 200:
            raise AgentUnreachable(f"the agent of this node refused: {status}")
        return body

    def _await_answer(self, message: w.Message, sock: socket.socket, limit: float) -> None:
        """Wait until there is something to read.  TimeoutError; AgentUnreachable if the agent is
        silent."""
        poll, until = select.poll(), time.monotonic() + limit
        poll.register(sock, select.POLLIN)
        moved = self._moved(message) if isinstance(message, LONG) else 0
        while not poll.poll(1000 * min(LOOK_S, max(until - time.monotonic(), 0.0))):
            if time.monotonic() >= until:
                before = moved
                if isinstance(message, LONG):
                    moved = self._moved(message)
                if moved == before or self.leaving:
                    raise TimeoutError
                until = time.monotonic() + limit
            elif self.look() == self.look() == "silent":
                raise self._note_silence()

    def _moved(self, order: w.Persist | w.Protect) -> int:
        """Return the bytes that the agent has stored or protected for an order's job; 0 if unknown."""
        kind = w.STORED if isinstance(order, w.Persist) else w.PROTECTED
        with suppress(TimeoutError, BlockingIOError):
            answer = decode_msgpack(self._ask(w.Status(), LOOK_S), _Answer)
            report = decode_msgpack(answer["ok"], w.AgentReport)
            return sum(job.moved.get(kind, 0) for job in report.jobs if job.job == order.job)
        return 0

    def look(self) -> Presence:
        """Ask the agent for its status, to find out if one answers, is silent, or is not there."""
        try:
            self._ask(w.Status(), SILENT_S)
        except (TimeoutError, BlockingIOError):  # the latter if its queue of connections is full
            return "silent"
        except AgentUnreachable:
            return "nobody"
        return "there"

    def ask_again(self) -> None:
        """Forget that an agent was silent."""
        self._silent_s = self._again_at = 0.0

    def silence(self) -> AgentUnreachable:
        """Return the error of an agent that runs and does not answer."""
        pid = self.pid
        return AgentUnreachable(
            f"the agent of this node, process {pid}, does not answer",
            hint=f"is it stopped, or stuck? `kill -9 {pid}` ends it; what it holds stays for the next one",
        )

    @property
    def pid(self) -> int:
        """The agent's process; the last one's if none is here, 0 if none ever was."""
        return self.agent()[0]

    def agent(self) -> tuple[int, str]:
        """Process and start time of the last agent that was here; 0 if none was."""
        last = last_agent(self.root)
        return last.pid, last.started

    def _is_waiting(self) -> bool:
        """True if an agent that was silent is not to be asked yet."""
        if time.monotonic() >= self._again_at:
            return False
        if process_state(*self.agent()) == "gone":
            self.ask_again()
        return self._again_at > 0.0

    def _note_silence(self) -> AgentUnreachable:
        """Return the error of a silent agent, and leave it alone for a while, twice as long each time:
        every look holds up the training."""
        with self._lock:
            first = time.monotonic() >= self._again_at  # several threads may find out at once
            if first:
                self._silent_s = min(max(2 * self._silent_s, AGAIN_S), MOST_AGAIN_S)
                self._again_at = time.monotonic() + self._silent_s
        if first:
            emit("agent.silent", pid=self.pid, again_s=self._silent_s)
        return self.silence()

    def start(
        self, host: str = "", budget: int = 0, *, stay: bool = False, tls: bool = False
    ) -> None:
        """Start an agent on this node unless there is one.  Several processes may do so at once.

        `stay`: a new agent does not leave by itself; `tls`: it serves other nodes by TLS.
        """
        if self._is_waiting():
            raise self.silence()
        found = self.look()
        if found == "there":
            self._has_answered = True
            self.ask_again()
            return
        if found == "silent" and (self._silent_s or self._still_silent()):
            raise self._note_silence()
        check_can_serve()
        with translated("make", "", str(self.root)):
            make_home(self.root)
        options = [f"--host={host}"] + [f"--budget={budget}"] * bool(budget)
        options += ["--stay"] * stay + ["--tls"] * tls
        process, again = self._spawn(options), time.monotonic() + RESTART_S
        until = time.monotonic() + START_S
        while (found := self.look()) != "there":
            status = process.poll()
            if status == 0 and found == "nobody" and time.monotonic() > again:
                process, again = self._spawn(options), time.monotonic() + RESTART_S
                continue
            if found == "silent" and time.monotonic() > until:
                raise self._note_silence()
            if status or time.monotonic() > until:
                why = f"it {ending(status)}" if status else f"none answers within {START_S:g} s"
                raise AgentUnreachable(
                    f"no agent on this node: {why}. {self._last_log_line()}",
                    hint=f"its log is {self.root}/agent.log",
                )
            time.sleep(0.02)

    def _still_silent(self) -> bool:
        """True if an agent that has answered before runs, and does not answer a second look: training waits
        for it.  One that has not answered yet may only be slow to begin."""
        if not self._has_answered or process_state(*self.agent()) != "runs":
            return False
        return self.look() == "silent"

    def _spawn(self, options: list[str]) -> subprocess.Popen[bytes]:
        path, variables = self.root / "agent.log", {"HOLDFAST_MEMORY_DIR": str(self.root)}
        with translated("begin an agent that logs to", "", str(path)):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with open(fd, "ab") as log:
                return spawn(
                    "holdfast.tiers.memory.node.agent", options, variables=variables, log=log
                )

    def _last_log_line(self) -> str:
        """The last line of the agent's log; empty if there is none."""
        with suppress(OSError):
            lines = (self.root / "agent.log").read_text(errors="replace").splitlines()
            return lines[-1] if lines else ""
        return ""


def check_can_serve() -> None:
    """UsageError if this Python lacks what an agent serves other nodes with."""
    if importlib.util.find_spec("aiohttp") is None:
        raise UsageError(
            "snapshots in memory need the package aiohttp, with which the agent of a node serves others",
            hint="pip install 'torch-holdfast[memory]'",
        )
