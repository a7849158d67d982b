"""Whether a process is gone: never guessed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.here import fate, place, started


def test_a_process_that_runs() -> None:
    assert fate(os.getpid(), started(os.getpid()) or "") == "runs"


def test_a_process_that_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    since = started(child.pid) or ""
    child.wait()
    assert fate(child.pid, since) == "gone"


def test_a_zombie_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    since = started(child.pid) or ""
    assert fate(child.pid, since) == "runs"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert fate(child.pid, since) == "gone"
    child.wait()


def test_another_process_of_the_same_number() -> None:
    assert fate(os.getpid(), "1") == "gone"


def test_a_process_that_cannot_be_seen_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `hidepid`: it may not be signalled, and has no /proc entry."""

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    monkeypatch.setattr(Path, "read_text", refuse)
    assert fate(os.getpid(), "1") == "unknown"


@pytest.mark.parametrize("pid", [2**40, 2**80])
def test_impossible_numbers(pid: int) -> None:
    assert fate(pid, "1") in ("unknown", "gone")


def test_place() -> None:
    assert place() == place()
    assert place()
