"""A worker: a process forked from the fork server, which runs the script like `python SCRIPT`."""

from __future__ import annotations

import faulthandler
import importlib.util
import io
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from types import ModuleType

from holdfast.launch import recovery
from holdfast.launch.channel import TRACEBACK_CHARS, WorkerEnd
from holdfast.launch.forkserver import Start

STACKS = signal.SIGRTMAX - 3
"""Upon this signal a worker writes the stacks of its threads to a file that the launcher reads."""

_OF_A_RANK = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
"""Environment variables of a rank.  A spare has no rank yet: the launcher's own values mean something else,
such as the RANK of a node, which Kubernetes' operators set."""


def become(start: Start, end: socket.socket, stacks: int) -> None:
    """Run the script, and raise its errors.  `stacks`: a file for the stacks of its threads."""
    os.setsid()
    recovery.listen_to(WorkerEnd(end, is_spare=start.is_spare))
    recovery.write_to(start.stdout, start.stderr)
    _write_lines()
    if start.is_spare:
        for name in _OF_A_RANK:
            os.environ.pop(name, None)
    os.environ.update(start.environment)
    faulthandler.register(STACKS, file=stacks, chain=False)
    _reseed()
    name, *arguments = start.words
    if start.is_module:
        _run_module(name, arguments)
    else:
        _run_script(name, arguments)


def show_failure(error: BaseException) -> None:
    """Print the script's error as Python would, and write it to the file that torch reads."""
    error.__traceback__ = recovery.of_script(error.__traceback__)
    sys.excepthook(type(error), error, error.__traceback__)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if path and not os.path.exists(path):  # else torch's `record` has written it
        text = "".join(traceback.format_exception(error))
        kind = "".join(traceback.format_exception_only(error)).strip()
        write_error(path, kind[-500:], text[-TRACEBACK_CHARS:])


def write_error(path: str, kind: str, error: str) -> None:
    """Write an error, its last line and its traceback, into the file that torch reads."""
    about = {"py_callstack": error, "timestamp": str(int(time.time()))}
    with suppress(OSError), open(path, "w") as file:
        json.dump({"message": {"message": kind, "extraInfo": about}}, file)


def _write_lines() -> None:
    """Write each printed line at once and whole, so that lines of ranks do not mix.

    torchrun's `python -u` writes a line and its newline separately.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # else there is none, or a module replaced it
            stream.reconfigure(line_buffering=True, write_through=False)


def _reseed() -> None:
    """Reseed numpy, if imported: forks would draw equal numbers.  Python reseeds itself at a fork."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _run_script(path: str, arguments: list[str]) -> None:
    sys.argv = [path, *arguments]
    if os.path.isdir(path) or path.endswith((".zip", ".pyz")):
        runpy.run_path(path, run_name="__main__")
        return
    absolute = os.path.join(os.getcwd(), path)  # as under Python: `..` is not resolved
    with io.open_code(absolute) as file:
        code = compile(file.read(), absolute, "exec")
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    main = ModuleType("__main__")
    main.__dict__.update(__file__=absolute, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _run_module(name: str, arguments: list[str]) -> None:
    sys.path[0] = os.getcwd()
    found = importlib.util.find_spec(name)
    sys.argv = [(found.origin if found is not None else None) or name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
