"""Ctrl-C in real processes: one line, status 130, and the same command goes on where the line says so."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import holdfast
from builders import Tensor, build
from cli.calling import call_json
from holdfast import events
from holdfast.layout import Mesh
from holdfast.store import LocalStore

LIMIT_S = 120.0
NUM, BYTES = 60, 4 << 20
SLOW = """
import os, runpy, sys, time

def slowed(call):
    def slow(*args):
        time.sleep(0.05)
        return call(*args)
    return slow

for name in ("preadv", "pwrite"):
    setattr(os, name, slowed(getattr(os, name)))
runpy.run_module("holdfast", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of 240 MB in 60 tensors."""
    path = tmp_path_factory.mktemp("interrupted") / "run"
    values = np.arange(BYTES // 4, dtype="f4")
    tensors = {f"model.w{i}": Tensor(values + i) for i in range(NUM)}
    build(LocalStore(path), Mesh((("dp", 1),)), tensors, step=1)
    return path


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Programs hear Ctrl-C, also where the tests are in the background of a shell, which has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def started(*words: object) -> subprocess.Popen[str]:
    """The command on a slow disk, so that it is seen in the middle of its work on a busy machine."""
    command = [sys.executable, "-c", SLOW, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextmanager
def stopped_once(process: subprocess.Popen[str], is_so: Callable[[], bool]) -> Iterator[None]:
    """The process stands still in this block, which begins once something is so."""
    until = time.monotonic() + LIMIT_S
    while not is_so():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.001)
    process.send_signal(signal.SIGSTOP)
    yield
    process.send_signal(signal.SIGCONT)


def interrupted(process: subprocess.Popen[str], is_so: Callable[[], bool]) -> str:
    """What a process says on stderr that gets Ctrl-C once something is so."""
    with stopped_once(process, is_so):
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, (out, err)
    assert out == ""
    return err


def bytes_read(process: subprocess.Popen[str]) -> int:
    text = Path(f"/proc/{process.pid}/io").read_text()
    return int(text.split("rchar: ")[1].split()[0])


@pytest.mark.parametrize(("to", "name"), [("torch", "w.pt"), ("safetensors", "w.safetensors")])
def test_convert_goes_on_within_a_file(root: Path, tmp_path: Path, to: str, name: str) -> None:
    """Blocks that are written are not read from the source again; one that has changed is made anew."""
    target = tmp_path / name
    command = ("convert", root, target, "--to", to)
    blocks = tmp_path / f"{name}.partial/files/{name}.blocks"
    process = started(*command)
    err = interrupted(process, lambda: blocks.exists() and blocks.stat().st_size >= 5 * 24)
    assert err == "interrupted; the same command goes on where it was\n"
    assert not target.exists()
    known = [*struct.iter_unpack("<QQQ", blocks.read_bytes())]
    assert 0 < sum(length for _, length, _ in known) < NUM * BYTES
    begun = blocks.with_suffix(".begun")
    before = begun.stat().st_ino
    (start, length, _) = max(known)
    with begun.open("r+b") as file:
        file.seek(start + length // 2)
        file.write(b"x" * 4096)
    read = events.counters["read.bytes"]
    made = holdfast.convert(root, target, to=to)
    read = events.counters["read.bytes"] - read
    assert made.num_files == 1 and target.stat().st_ino == before
    assert not (tmp_path / f"{name}.partial").exists()
    spared = sum(length for _, length, _ in known) - length
    assert read <= NUM * BYTES - spared // 2  # chunks at the ends of blocks are read twice
    with holdfast.open(target) as found, holdfast.open(root) as expected:
        for i in range(NUM):
            values = expected.read(f"model.w{i}")
            assert np.array_equal(found.read(f"model.w{i}"), values)


def test_convert_goes_on_with_the_files_that_are_not_written(root: Path, tmp_path: Path) -> None:
    command = ("convert", root, tmp_path / "out", "--to", "huggingface", "--max-file", "4MB")
    written = tmp_path / "out.partial/files"
    process = started(*command)
    err = interrupted(process, lambda: any(written.glob("model-*.safetensors")))
    assert err == "interrupted; the same command goes on where it was\n"
    assert not (tmp_path / "out").exists()
    there = len([*written.glob("model-*.safetensors")])
    assert 0 < there < NUM
    code, found = call_json(*command)
    assert (code, found["num_files"], found["num_resumed"]) == (0, NUM, there)


def test_copy_goes_on_with_the_files_that_are_not_written(tmp_path: Path) -> None:
    tensors = {"model.w": Tensor(np.zeros((8, 4 << 20), "f4"))}
    build(LocalStore(tmp_path / "a"), Mesh((("dp", 8),)), tensors, step=1)
    command = ("copy", tmp_path / "a", tmp_path / "b")
    process = started(*command)
    err = interrupted(process, lambda: any(tmp_path.glob("b/steps/*/*/.tmp-*")))
    assert err == "interrupted; the same command goes on with the files that are not written yet\n"
    assert not [*tmp_path.glob("b/steps/*/manifest.json")]
    assert call_json(*command)[1]["steps"][0]["outcome"] == "copied"


@pytest.mark.parametrize("verb", ["verify", "diff"])
def test_other_verbs_say_no_more_than_that(root: Path, verb: str) -> None:
    words = (verb, root) if verb == "verify" else (verb, root, root)
    process = started(*words)
    assert interrupted(process, lambda: bytes_read(process) > 100_000_000) == "interrupted\n"


def test_the_agent_in_the_foreground_ends_by_ctrl_c(tmp_path: Path) -> None:
    environment = {**os.environ, "HOLDFAST_MEMORY_DIR": str(tmp_path / "node")}
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "agent", "run"], env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until = time.monotonic() + LIMIT_S
    while not (tmp_path / "node/agent.sock").exists():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert "Traceback" not in err and process.returncode in (0, 130)


def test_json_of_an_interrupted_verb_is_nothing(root: Path) -> None:
    """Half a document would be worse."""
    process = started("verify", root, "--json")
    assert interrupted(process, lambda: bytes_read(process) > 100_000_000) == "interrupted\n"
