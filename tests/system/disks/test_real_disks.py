"""Disks that are frozen (`fsfreeze` on a loop mount) or full (a small tmpfs): calls end, and say why.

What touches a frozen file system cannot be killed until it thaws.  So nothing here does but processes of
its own, and one that was started before the disk was frozen thaws it in any case.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import HoldfastError

pytestmark = pytest.mark.soak

THAW_S = 60
"""After so long the disk thaws, whatever has become of the test."""
MAY_SUCCEED = {"steps", "open", "load", "wait", "close"}
"""A frozen ext4 may be read; and a failed save that its handle has told is not told again."""


def run(*command: str, timeout_s: float = 30.0) -> bool:
    """Whether a tool is there and has succeeded; it is a process of its own."""
    try:
        return not subprocess.run(command, capture_output=True, timeout=timeout_s).returncode
    except (OSError, subprocess.TimeoutExpired):
        return False


@pytest.fixture
def disk() -> Iterator[str]:
    """Where an ext4 file system of its own is mounted."""
    folder = tempfile.mkdtemp(prefix="holdfast-disk-")
    image, mount = f"{folder}/image", f"{folder}/mount"
    os.mkdir(mount)
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    can = os.geteuid() == 0 and shutil.which("fsfreeze") and run("mkfs.ext4", "-q", "-F", image)
    if not can or not run("mount", "-o", "loop", image, mount):
        shutil.rmtree(folder)
        pytest.skip("needs root, Linux, mkfs.ext4, fsfreeze and loop mounts")
    try:
        yield mount
    finally:
        run("fsfreeze", "-u", mount)
        if run("umount", "-l", mount):
            shutil.rmtree(folder)


def lines_of(process: subprocess.Popen[str]) -> queue.SimpleQueue[str]:
    """What it says, by a thread, so that nobody waits for it without a limit."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    stdout = process.stdout
    assert stdout is not None

    def read() -> None:
        for line in stdout:
            lines.put(line.strip())
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    return lines


def test_a_frozen_disk(disk: str) -> None:
    calls = subprocess.Popen(
        [sys.executable, "-m", "system.disks.calls_on_a_frozen_disk", disk],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watchdog = subprocess.Popen(
        ["sh", "-c", f"sleep {THAW_S}; fsfreeze -u '{disk}'"], start_new_session=True
    )
    told: dict[str, Any] = {}
    try:
        lines = lines_of(calls)
        assert lines.get(timeout=300) == "ready"
        assert run("fsfreeze", "-f", disk)
        assert calls.stdin is not None
        calls.stdin.write("go\n")
        calls.stdin.flush()
        while line := lines.get(timeout=THAW_S):
            name, kind, text, seconds = json.loads(line)
            told[name] = kind, text, seconds
            if name == "open":  # the last one
                break
    finally:
        run("fsfreeze", "-u", disk)
        os.killpg(watchdog.pid, 9)
        watchdog.wait(120)
        calls.wait(300)  # a process that the disk has held up ends when it thaws
    assert len(told) == 11
    for name, (kind, text, seconds) in told.items():
        assert seconds < 15, (name, kind, text, seconds)
        if name in MAY_SUCCEED and not kind:
            continue
        assert kind in ("Deadline", "RankErrors", "AgentError"), (name, kind, text)
        if name != "Save.wait(timeout)":
            assert "storage has not answered" in text, (name, text)
            assert disk in text, (name, text)
    assert calls.returncode == 0


def fill(folder: Path) -> None:
    """Leave not one byte."""
    with open(folder / "filler", "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A disk with step 1 in the folder `root` and not one byte left."""
    if not run("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)):
        pytest.skip("cannot mount a small tmpfs")
    try:
        holdfast.save(tmp_path / "root", state(1.0), step=1)
        fill(tmp_path)
        yield tmp_path
    finally:
        run("umount", "-l", str(tmp_path))


def state(value: float) -> dict[str, Any]:
    return {"data": {"w": torch.full((100_000,), value)}}


def test_a_full_disk(full: Path) -> None:
    root = full / "root"
    for call in (
        lambda: holdfast.Checkpointer(root, state(0.0), deadline_s=10),
        lambda: holdfast.save(root, state(0.0), step=2, deadline_s=10),
    ):
        with pytest.raises(HoldfastError, match="ENOSPC") as failed:
            call()
        assert str(full) in str(failed.value)
        assert "free space" in str(failed.value)
    live = state(0.0)
    assert holdfast.load(root, live, deadline_s=10) == 1
    assert live["data"]["w"][0] == 1.0
    assert holdfast.steps(root) == [1]


def test_a_disk_that_fills_up_under_a_run(full: Path) -> None:
    root, live = full / "root", state(2.0)
    (full / "filler").rename(full / "moved")
    os.truncate(full / "moved", 3 << 20)
    with holdfast.Checkpointer(root, live, deadline_s=10, on_error="raise") as ckpt:
        assert ckpt.restore() == 1
        fill(full)
        with pytest.raises(HoldfastError, match="ENOSPC"):
            ckpt.save(2).wait()
        ckpt.wait()
        assert ckpt.restore() == 1
    assert holdfast.steps(root) == [1]
