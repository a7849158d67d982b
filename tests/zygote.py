"""Python programs, forked from a process that has imported torch and holdfast: each begins in 0.1 s.

    done = zygote.run(["-c", CODE, root])                             # as of subprocess.run
    program = zygote.start(["-m", "tiers.mirror.train_recorded", place], out=out)  # as of subprocess.Popen
    program.wait(60)

One such process serves all files that a worker of pytest runs.  A program has its own arguments, variables,
working directory, session and output; but it hashes strings as all others do, and what it imports may be
imported already: PRELOAD, and what ZYGOTE_PRELOAD names.  What is to be shown of an interpreter's beginning
needs a new one.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

TESTS = Path(__file__).parent
PRELOAD = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "holdfast.session.checkpointer",
    "holdfast.session.save_and_load",
    "holdfast.session.restart",
    "holdfast.formats.looking",
    "holdfast.cli.main",
)
"""What a rank would import, most of it when it makes its first optimizer or restores: seconds each time."""
MOST_BYTES = 1 << 20
"""Of a request: arguments and variables."""
PAUSE_S = 0.01


class Program:
    """A program that was forked; of `subprocess.Popen` it has what tests ask for."""

    def __init__(self, server: Server, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, negative for a signal.  TimeoutExpired"""
        until = time.monotonic() + (timeout or float("inf"))
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"a forked program, {self.pid}", timeout or 0.0)
            time.sleep(PAUSE_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """The process that forks, from the side of those who ask."""

    def __init__(self) -> None:
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for one in (own, theirs):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MOST_BYTES)
        self._socket, self._lock = own, threading.Lock()
        command = [sys.executable, str(Path(__file__)), str(theirs.fileno())]
        path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
        env = os.environ | {"PYTHONPATH": path, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self._process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()])
        theirs.close()

    def ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> Any:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
            answer = self._socket.recv(MOST_BYTES)
        assert answer, f"the process that forks has ended: {self._process.wait()}"
        return json.loads(answer)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(60)


@functools.cache
def server() -> Server:
    begun = Server()
    atexit.register(begun.close)
    return begun


def start(
    args: Sequence[object],
    *,
    stdin: int | None = None,
    out: Path | int | None = None,
    err: Path | None = None,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> Program:
    """Begin a program: `-m MODULE ...`, `-c CODE ...` or `FILE ...`.  What it prints is appended to `out`
    and `err` (default: where `out` goes), or else is this process's.  `stdin` is a descriptor; `out` may be
    one, to which errors do not go."""
    files = [os.open(os.devnull, os.O_RDONLY) if stdin is None else os.dup(stdin)]
    files += [os.dup(out if isinstance(out, int) else 1), os.dup(2)]
    out = None if isinstance(out, int) else out
    for number, file in ((1, out), (2, err or out)):
        if file is not None:
            os.close(files[number])
            files[number] = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    request = {
        "args": [str(arg) for arg in args],
        "env": dict(os.environ if env is None else env),
        "cwd": str(cwd or Path.cwd()),
    }
    try:
        return Program(server(), server().ask(request, files))
    finally:
        for one in files:
            os.close(one)


def run(
    args: Sequence[object],
    *,
    input: str = "",
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; it is killed after `timeout` seconds.  TimeoutExpired"""
    with tempfile.TemporaryDirectory(prefix="holdfast-program-") as place:
        given, out, err = Path(place, "given"), Path(place, "out"), Path(place, "err")
        given.write_text(input)
        with given.open() as file:
            program = start(args, stdin=file.fileno(), out=out, err=err, env=env, cwd=cwd)
        try:
            code = program.wait(timeout)
        finally:
            program.kill()
        return subprocess.CompletedProcess(args, code, out.read_text(), err.read_text())


# -- the process that forks -------------------------------------------------------------------------------


def _serve(number: int) -> None:
    asked = socket.socket(fileno=number)
    for name in [*PRELOAD, *filter(None, os.environ.get("ZYGOTE_PRELOAD", "").split(","))]:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "something that was imported has begun threads"
    gc.collect()
    gc.freeze()  # nor does the collector copy it in each fork
    ended: dict[int, int] = {}
    while True:
        text, fds, _, _ = socket.recv_fds(asked, MOST_BYTES, 3)
        if not text:
            return
        request = json.loads(text)
        with suppress(ChildProcessError):
            while (done := os.waitpid(-1, os.WNOHANG))[0]:
                ended[done[0]] = os.waitstatus_to_exitcode(done[1])
        if "poll" in request:
            answer = ended.get(request["poll"])
        elif answer := os.fork():
            ended.pop(answer, None)  # an earlier program had the same number
            for one in fds:
                os.close(one)
        else:
            asked.close()
            _become(request, fds)
        asked.send(json.dumps(answer).encode())


def _become(request: dict[str, Any], fds: Sequence[int]) -> NoReturn:
    os.setsid()
    for number, one in enumerate(fds):
        os.dup2(one, number)
        os.close(one)
    code = 1
    try:
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        _execute(request["args"])
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if ended.code is not None and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]  # as at any exit
            atexit._run_exitfuncs()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _execute(args: list[str]) -> None:
    kind, *rest = args
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        sys.argv = rest
        sys.modules.pop(rest[0], None)  # it was imported under its own name
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = args
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
