"""Whether a process is gone: never guessed.  What memory there is for this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.base.host import host_id, process_state, start_time
from holdfast.base.memory_limit import memory_bytes


def test_a_process_that_runs() -> None:
    assert process_state(os.getpid(), start_time(os.getpid()) or "") == "runs"


def test_a_process_that_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    since = start_time(child.pid) or ""
    child.communicate(b"\n")
    assert process_state(child.pid, since) == "gone"


def test_a_zombie_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    since = start_time(child.pid) or ""
    assert process_state(child.pid, since) == "runs"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_state(child.pid, since) == "gone"
    child.wait()


def test_another_process_of_the_same_number() -> None:
    assert process_state(os.getpid(), "1") == "gone"


def test_a_process_that_cannot_be_seen_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `hidepid`: it may not be signalled, and has no /proc entry."""

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert process_state(os.getpid(), "1") == "unknown"


@pytest.mark.parametrize("pid", [2**40, 2**80])
def test_impossible_numbers(pid: int) -> None:
    assert process_state(pid, "1") in ("unknown", "gone")


@pytest.mark.parametrize("since", ["", "0", "?", "closed"])
def test_a_start_that_is_no_time_proves_nothing(since: str) -> None:
    assert process_state(os.getpid(), since) == "unknown"


def test_a_process_with_half_a_letter_in_its_name(tmp_path: Path) -> None:
    """The kernel cuts names at 15 bytes."""
    script = tmp_path / "apprentissages\u00e9"
    script.write_text(f"#!{sys.executable}\ninput()\n")
    script.chmod(0o755)
    child = subprocess.Popen([script], stdin=subprocess.PIPE)
    assert process_state(child.pid, start_time(child.pid) or "") == "runs"
    child.kill()
    child.wait()


def test_place() -> None:
    assert host_id() == host_id()
    assert host_id()


@pytest.mark.parametrize(
    ("told", "limits", "expected"),
    [
        ("", {}, None),
        ("0::/\n", {"memory.max": "max"}, None),
        ("0::/\n", {"memory.max": "5000"}, 5000),
        ("0::/a/b\n", {"a/memory.max": "3000", "a/b/memory.max": "4000"}, 3000),
        ("4:cpu:/c\n3:hugetlb,memory:/s\n0::/\n", {"memory/s/memory.limit_in_bytes": "2000"}, 2000),
        ("3:memory:/docker/x\n", {"memory/memory.limit_in_bytes": "1000"}, 1000),
    ],
)
def test_memory_is_what_control_groups_leave(
    tmp_path: Path, told: str, limits: dict[str, str], expected: int | None
) -> None:
    """Of version 2 and 1, at every level; in a container the own one may be the root."""
    files = {"proc/self/cgroup": told, **{f"sys/fs/cgroup/{k}": v for k, v in limits.items()}}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    all_of_it = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory_bytes(tmp_path) == (expected or all_of_it)
