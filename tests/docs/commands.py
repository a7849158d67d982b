"""The commands that the documentation prints in its console blocks, and what it shows of their output.

    ```console                 each line `$ COMMAND` is run, in order, where the page's programs were
    ```console exit=1          ... and ends with this status
    ```console soak            ... by `make soak` alone, because it takes long

A command goes on after a backslash; a comment after it is the shell's.  The lines after a command are what
it prints, on stdout and stderr: compared line by line, but for numbers with their units, ages, digests and
paths.  A line `...` stands for any lines, and `…` in a line for any text.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.main import main

DEADLINE_S = 120
PROMPT = "$ "

NOT_RUN = {
    "make demo": "takes minutes, and is what CI runs itself; tests/examples has its parts",
    "make test": "it is this very suite",
    "make check": "it is what CI runs itself",
    "pip install 'holdfast[torch]'": "installs packages",
    "pytest tests/distributed/test_ucp.py -s": "it is part of this very suite",
    "holdfast agent run": "serves until it is stopped; tests/memory/test_agent_verb.py runs it",
    "python -c 'import threading, torch.distributed as d;": "serves for ever, at another host's address",
    "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 GLOO_SOCKET_IFNAME=eth0": "names a network card",
    "torchrun --nnodes=1:4 --nproc-per-node=8": "needs nodes at these addresses; tests/nodes makes some",
    "sysctl -w": "changes the kernel's settings",
}
"""By how a command begins: why no test runs it."""


@dataclass(frozen=True)
class Command:
    """One command of a page, and what is shown after it."""

    text: str
    output: list[str]
    exit: int
    is_soak: bool
    where: str

    @property
    def reason(self) -> str | None:
        """The beginning in `NOT_RUN` that this command has; None if it is run."""
        return next((start for start in NOT_RUN if self.text.startswith(start)), None)


def commands_of(text: str, options: str, where: str) -> Iterator[Command]:
    """The commands of a block."""
    wanted = re.search(r"exit=(\d+)", options)
    lines = text.replace("\\\n", " ").splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith(PROMPT)]
    assert starts[:1] == [0], f"{where}: a console block begins with a command"
    for start, stop in zip(starts, [*starts[1:], len(lines)]):
        output = [line for line in lines[start + 1 : stop] if line.strip()]
        words = re.sub(r"\s+", " ", lines[start].removeprefix(PROMPT)).strip()
        yield Command(words, output, int(wanted[1]) if wanted else 0, "soak" in options, where)


def run(command: Command, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """Run a command and hold it to its status and to what is shown of its output."""
    code, printed = _run(command.text, monkeypatch, capfd)
    told = f"{command.where}: {command.text}\n{printed}"
    assert code == command.exit, told
    if command.output:
        shown, found = shape(command.output), shape(printed.splitlines())
        assert matches(shown, found), "\n".join([told, "--- shown", *shown, "--- printed", *found])


def _run(text: str, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> tuple[int, str]:
    words = shlex.split(text, comments=True)
    if words[0] != "holdfast":
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", text], env={**os.environ, "PATH": path}, timeout=DEADLINE_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout
    monkeypatch.setattr(sys, "argv", words)  # in this process: half a second less for each
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0), "".join(capfd.readouterr())


_UNIT = r"(?: ?(?:[kMGT]i?B(?:/s)?|B|%|min|h|d|s|ms)\b| ?%)?"
_AGE = re.compile(rf"just now|\d+{_UNIT} ago")
_PLACE = re.compile(r"file://\S+?(?=[:,]?(?:\s|$))")
_NUMBER = re.compile(rf"\b[0-9a-f]{{16}}\b|(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?{_UNIT}(?![\w.])")


def shape(lines: list[str]) -> list[str]:
    """Lines without what differs from run to run: places, ages, numbers, and how wide a table is."""
    return [
        re.sub(r"\s+", " ", _NUMBER.sub("N", _AGE.sub("AGE", _PLACE.sub("PLACE", line)))).strip()
        for line in lines
        if line.strip()
    ]


def matches(shown: list[str], found: list[str]) -> bool:
    """Whether lines are those shown."""
    if not shown:
        return not found
    if shown[0] == "...":
        return any(matches(shown[1:], found[i:]) for i in range(len(found) + 1))
    line = ".*".join(map(re.escape, shown[0].split("…")))
    return bool(found) and bool(re.fullmatch(line, found[0])) and matches(shown[1:], found[1:])
