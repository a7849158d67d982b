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
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.main import main

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEADLINE_S = 400
SOAK_S = 1500
ROOT = Path(__file__).parents[2]
PROMPT = "$ "

NOT_RUN = {
    "make test": "it is this very suite",
    "pytest tests/system/distributed/test_ucp.py": "`make soak` runs this file itself",
}
"""By how a command begins: why no test runs it.  Each reason is proved by `test_commands`."""

ELASTIC = "system/nodes/test_elastic_page.py"
ELSEWHERE = {
    "python -c 'import threading, torch.distributed as d;": ELASTIC,
    "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 GLOO_SOCKET_IFNAME=eth0": ELASTIC,
    "torchrun --nnodes=1:4 --nproc-per-node=8": ELASTIC,
    "sysctl -w": ELASTIC,
    "holdfast run --nproc-per-node": "launching/test_run.py",
    "holdfast prove --seed 7 --": "prove/test_trainers.py",
}
"""By how a command begins: the test that runs it, since it needs nodes or a script of its own."""

SERVING = {"holdfast agent run": "holdfast agent status"}
"""Commands that serve until they are stopped, and what ends with 0 as soon as they do."""


@dataclass(frozen=True)
class Command:
    """One command of a page, and what is shown after it."""

    text: str
    output: list[str]
    exit: int
    is_soak: bool
    where: str

    @property
    def start(self) -> str | None:
        """The beginning in `NOT_RUN` or `ELSEWHERE` that this command has; None if it is run."""
        return next((s for s in (*NOT_RUN, *ELSEWHERE) if self.text.startswith(s)), None)


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
    code, printed = _run(command, monkeypatch, capfd)
    told = f"{command.where}: {command.text}\n{printed}"
    assert code == command.exit, told
    if command.output:
        shown, found = shape(command.output), shape(printed.splitlines())
        assert matches(shown, found), "\n".join([told, "--- shown", *shown, "--- printed", *found])


def _run(command: Command, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> tuple[int, str]:
    words = shlex.split(command.text, comments=True)
    if " ".join(words) in SERVING:
        return _serve(" ".join(words))
    if words[0] != "holdfast":
        folder, environment = Path(), dict(os.environ)
        if words[0] in ("make", "pytest"):
            folder = copy_of_the_tree()
        if words[:2] == ["pip", "install"]:
            folder = copy_of_the_tree()
            environment |= installing(words[2])
        done = _shell(command.text, folder, environment, SOAK_S if command.is_soak else DEADLINE_S)
        if words[:2] == ["pip", "install"] and done.returncode == 0:
            check_installed(Path(environment["PIP_TARGET"]))
        return done.returncode, done.stdout
    monkeypatch.setattr(sys, "argv", words)  # in this process: half a second less for each
    monkeypatch.setenv("PATH", _path())
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0), "".join(capfd.readouterr())


def _shell(
    text: str, folder: Path, environment: dict[str, str], limit_s: float
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", text], env={**environment, "PATH": _path()}, cwd=folder, timeout=limit_s,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip


def _path() -> str:
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def _serve(text: str) -> tuple[int, str]:
    """Start a command that serves, wait until it does, and stop it; its status and output."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {text}"], env={**os.environ, "PATH": _path()},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        until = time.monotonic() + DEADLINE_S
        while process.poll() is None and time.monotonic() < until:
            if _shell(SERVING[text], Path(), dict(os.environ), DEADLINE_S).returncode == 0:
                break
        process.terminate()
        printed = process.communicate(timeout=DEADLINE_S)[0]
    finally:
        process.kill()
    return process.returncode, printed


def copy_of_the_tree() -> Path:
    """What is in the repository, in the current folder, with the environment that `make` has made."""
    copy = Path("tree").absolute()
    if copy.exists():
        return copy
    if not (ROOT / ".venv" / ".ready").exists():
        pytest.skip("`make` has made no .venv here")
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, files.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    (copy / ".venv").symlink_to(ROOT / ".venv")
    return copy


def installing(wanted: str) -> dict[str, str]:
    """What pip is told by the environment: to install into a folder of its own, without what the package
    needs, which is here already."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert wanted.startswith(".")
    assert set(re.findall(r"\[(\w+)\]", wanted)) <= set(extras), extras
    target = str(Path("installed").absolute())
    # "0" is pip's way to say so by the environment: what builds is here, too
    return {
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_TARGET": target,
    }


def check_installed(target: Path) -> None:
    """What was installed is used, and says its version."""
    code = f"import sys; sys.path.insert(0, {str(target)!r}); import holdfast; print(holdfast.__file__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith(str(target)), done.stdout + done.stderr


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
