"""Completion: the words for a line, and what a real bash makes of them at the press of a key."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from builders import FSDP_TP, build, transformer
from cli.calling import call, call_json
from holdfast.cli.main import LAUNCH, parser_of
from holdfast.cli.verbs import VERBS
from holdfast.core.checkpoint.notes import pin
from holdfast.store import LocalStore


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the root `run`, whose steps are 10, 25 and 300, the last with two labels."""
    store = LocalStore(tmp_path / "run")
    for step in (10, 25, 300):
        build(store, FSDP_TP, transformer(), step=step)
    pin(store, 300, "best")
    pin(store, 300, "two words; rm")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(line: str) -> list[str]:
    code, out, _ = call("completion", "words", "--", line)
    assert code == 0 and call_json("completion", "words", line)[1] == out.splitlines()
    return out.splitlines()


def test_the_words_for_a_line(here: Path) -> None:
    assert set(words("holdfast ")) >= {*VERBS, LAUNCH, "help"}
    assert words("holdfast ve") == ["verify"]
    assert words("holdfast help in") == ["inspect"]
    assert words("holdfast verify --") == sorted(
        n for n in parser_of("verify").names if n[0] == "-"
    )
    assert words("holdfast inspect run --st") == ["--stats"]
    assert words("holdfast run --np") == ["--nproc-min", "--nproc-per-node"]
    assert words("holdfast convert run out --to d") == ["dcp", "deepspeed"]
    assert words("holdfast agent st") == ["start", "status", "stop"]
    assert words("holdfast completion z") == ["zsh"]
    assert words("holdfast verify run@") == ["run@10", "run@25", "run@300", "run@best"]
    assert words("holdfast diff run@10 ./run@2") == ["./run@25"]
    assert words("holdfast pin run 3") == ["300"]
    assert words("holdfast pin --remove run b") == ["best"]


def test_where_there_is_nothing_to_say(here: Path) -> None:
    """The shell then completes names of files; no line is an error."""
    nothing = (
        "", "holdfast", "holdfast ls ", "holdfast ls ru", "holdfast nonsense x", "holdfast ls no@",
        "holdfast ls s3://bucket/run@", "holdfast ls dpc:run@", "holdfast pin run 10 ",
    )  # fmt: skip
    for line in nothing:
        assert call("completion", "words", "--", line) == (0, "", "")


def test_a_root_of_another_system_has_steps_too(here: Path) -> None:
    assert call("convert", "run@10", "old", "--to", "dcp")[0] == 0
    assert words("holdfast inspect dcp:old@") == ["dcp:old@0"]


def test_a_shell_without_a_script_is_refused() -> None:
    code, _, err = call("completion", "bsh")
    assert code == 2 and "did you mean 'bash'" in err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_those_of_the_shell(shell: str) -> None:
    code, out, _ = call("completion", shell)
    assert code == 0 and "holdfast completion words" in out
    if shutil.which(shell):
        flag = "--no-execute" if shell == "fish" else "-n"
        done = subprocess.run([shell, flag], input=out, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def in_bash(folder: Path, *keys: str) -> str:
    """What an interactive bash prints that has loaded the script, for keys that are pressed in turn."""
    tool = folder / "bin/holdfast"
    tool.parent.mkdir()
    tool.write_text(
        f'#!/bin/sh\n[ "$1" = completion ] && exec {sys.executable} -m holdfast "$@"\necho "RAN<$*>"\n'
    )
    tool.chmod(0o755)
    path = f"{tool.parent}:{os.environ['PATH']}"
    pid, fd = pty.fork()
    if not pid:
        os.environ.update(PATH=path, TERM="dumb", PS1="READY> ", INPUTRC="/dev/null")
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
    seen = ""

    def until(text: str) -> str:
        """Read until a text comes, or for two minutes."""
        nonlocal seen
        end = time.monotonic() + 120
        while text not in seen:
            assert time.monotonic() < end, seen
            if select.select([fd], [], [], 1.0)[0]:
                seen += os.read(fd, 4096).decode()
        before, _, seen = seen.partition(text)
        return before

    try:
        until("READY> ")
        os.write(fd, b'eval "$(holdfast completion bash)" && echo LOA""DED\n')
        until("LOADED")
        for key in keys:
            os.write(fd, key.encode())
        return until(">\r\n").rpartition("RAN<")[2]
    finally:
        os.close(fd)
        os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("typed", "ran"),
    [
        ("holdfast ver\t run@2\t--qu\t", "verify run@25 --quick"),
        ("holdfast inspect ./run@b\t", "inspect ./run@best"),
        ("holdfast convert run@3\tout --to hugg\t", "convert run@300 out --to huggingface"),
        ("holdfast ls ru\t", "ls run/"),
    ],
)
def test_in_a_real_bash(here: Path, typed: str, ran: str) -> None:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    assert in_bash(here, typed, "\n").strip() == ran
