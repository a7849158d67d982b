"""Talking to the agent of this node; starting it where there is none."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from holdfast import errors
from holdfast.errors import AgentUnreachable, HoldfastError
from holdfast.memory.node import words as w
from holdfast.memory.node.segment import check_home, home

START_S = 20.0
HURRIED_S = 1.0
_T = TypeVar("_T")


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
    """One process's line to its node's agent.  Thread-safe; every call has a deadline."""

    def __init__(self, root: Path | None = None, deadline_s: float = 600.0) -> None:
        self.root = root or home()
        self.deadline_s = deadline_s
        self._lock = threading.Lock()
        self._open: set[_Connection] = set()
        self._leaving = False

    def hurry(self) -> None:
        """End every call under way with AgentUnreachable, and later ones after a second."""
        with self._lock:
            self._leaving = True
            for line in self._open:
                line.hang_up()

    def ask(self, message: w.Message, kind: type[_T] | Any = Any, timeout_s: float = 0.0) -> Any:
        """The answer, as `kind`; the error that the agent answers with; AgentUnreachable."""
        limit = timeout_s or self.deadline_s
        with self._lock:
            limit = min(limit, HURRIED_S) if self._leaving else limit
            line = _Connection(self.root / "agent.sock", limit)
            self._open.add(line)
        try:
            check_home(self.root)
            line.request("POST", "/", w.encode(message))
            response = line.getresponse()
            status, body = response.status, response.read()
        except TimeoutError:
            raise AgentUnreachable(
                f"the agent of this node did not answer within {limit:g} s",
                hint=f"its log is {self.root}/agent.log",
            ) from None
        except (OSError, http.client.HTTPException) as error:
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
        answer = msgspec.msgpack.decode(body)
        if "error" in answer:
            raise _error(answer)
        return msgspec.convert(answer["ok"], kind)

    def is_there(self) -> bool:
        """Whether an agent answers."""
        try:
            self.ask(w.Status(), timeout_s=5.0)
        except AgentUnreachable:
            return False
        return True

    def start(
        self, host: str = "", budget: int = 0, *, stay: bool = False, tls: bool = False
    ) -> None:
        """Have an agent on this node.  Several processes may do so at once.

        `stay`: one that is started now does not leave by itself; `tls`: it serves other nodes so.
        """
        if self.is_there():
            return
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_home(self.root)
        command = [sys.executable, "-m", "holdfast.memory.node.agent", f"--host={host}"]
        command += [f"--budget={budget}"] * bool(budget) + ["--stay"] * stay + ["--tls"] * tls
        with open(
            os.open(self.root / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab"
        ) as out:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True, env=_environment(self.root), cwd="/",
            )  # fmt: skip
        until = time.monotonic() + START_S
        while not self.is_there():
            status = process.poll()
            if status or time.monotonic() > until:
                why = f"it ended with {status}" if status else f"none answers within {START_S:g} s"
                raise AgentUnreachable(
                    f"no agent on this node: {why}. {self._last_words()}",
                    hint=f"its log is {self.root}/agent.log",
                )
            time.sleep(0.02)

    def _last_words(self) -> str:
        """The end of its log."""
        with suppress(OSError):
            lines = (self.root / "agent.log").read_text(errors="replace").splitlines()
            return lines[-1] if lines else ""
        return ""


def _environment(root: Path) -> dict[str, str]:
    """The agent's: this one, where it finds the same holdfast, and nothing of the launcher's."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "NCCL_"))}
    package = str(Path(errors.__file__).resolve().parent.parent)
    path = [package, *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
    return {**kept, "PYTHONPATH": os.pathsep.join(path), "HOLDFAST_MEMORY_DIR": str(root)}


def _error(answer: dict[str, str]) -> HoldfastError:
    kind = getattr(errors, answer["error"], None)
    if not (isinstance(kind, type) and issubclass(kind, HoldfastError)):
        kind = errors.AgentError
    error: HoldfastError = kind(answer["text"], hint=answer["hint"] or None)
    return error
