"""A script that ends without `close()`: what is under way is finished, and whatever is not is told."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import holdfast
from holdfast.core.checkpoint.recorded import last_recorded
from holdfast.core.checkpoint.verifying import verify
from holdfast.store import open_store
from system.distributed.launch import launch

pytestmark = pytest.mark.slow

SCRIPTS = {
    "at_its_end": 0,
    "by_an_error": 1,
    "by_sys_exit": 3,
    "with_records": 0,
    "after_a_save_has_failed": 0,
    "with_storage_that_does_not_answer": 0,
    "with_several_endings_that_fail": 0,
    "when_closed": 0,
    "as_rank_0": 0,
    "as_rank_1": 0,
}
"""And the exit status of each."""
Ended = Callable[[str], tuple[int, str, Path]]
ONLY_SLOW = re.compile(r"\[held-long\]|waiting, for at most \d+ s: ")
"""What a busy machine may make true; nothing is lost by it."""


def complaints(said: str) -> list[str]:
    """The warnings but for those that something was slow."""
    lines = [line for line in said.splitlines() if "HoldfastWarning" in line]
    return [line for line in lines if not ONLY_SLOW.search(line)]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The exit status of a script, what it said, and its root."""
    folder = tmp_path_factory.mktemp("scripts")
    ran = subprocess.run(
        [sys.executable, "-m", "system.disks.scripts_that_end", str(folder), *SCRIPTS],
        env={
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    status = dict(line.split() for line in ran.stdout.splitlines())
    return lambda name: (
        int(status[name]),
        (folder / f"{name}.txt").read_text(),
        folder / name,
    )


@pytest.mark.parametrize("name", ["at_its_end", "by_an_error", "by_sys_exit", "when_closed"])
def test_the_save_under_way_is_finished(ended: Ended, name: str) -> None:
    status, said, root = ended(name)
    assert status == SCRIPTS[name], said
    assert holdfast.steps(root) == [1, 2, 3]
    assert verify(open_store(root), 3).good
    assert ("ArithmeticError" in said) == (name == "by_an_error")
    assert not complaints(said)


def test_records_are_written_by_their_writer(ended: Ended) -> None:
    status, said, root = ended("with_records")
    assert (status, said) == (0, "")
    assert last_recorded(open_store(root).list("log/"), 1, 1) == 3


def test_a_failure_that_nobody_has_asked_about_is_told(ended: Ended) -> None:
    status, said, _ = ended("after_a_save_has_failed")
    assert status == 0
    assert "HoldfastWarning: the save of step 5 failed: " in said
    assert "ENOTDIR" in said


def test_what_is_dropped_is_told(ended: Ended) -> None:
    status, said, root = ended("with_storage_that_does_not_answer")
    assert status == 0
    dropped = (
        r"Python ended before the save of step 5 was done, which was given (\d+) s: it is dropped"
    )
    given = re.search(dropped, said)
    assert given and int(given[1]) >= 1, said
    assert f"'{root}/steps/" in said
    assert "storage has not answered for" in said


def test_each_ending_is_made_and_each_error_told(ended: Ended) -> None:
    status, said, root = ended("with_several_endings_that_fail")
    assert status == 0, said
    assert "ArithmeticError: in an ending" in said
    for name in ("one", "two"):
        assert f"'{root}/{name}/steps" in said, said


def test_on_two_ranks(ended: Ended) -> None:
    status, said, root = zip(*(ended(f"as_rank_{rank}") for rank in (0, 1)))
    assert status == (0, 0), said
    root = root[0].with_name("as_ranks")
    assert holdfast.steps(root) == [1, 2, 3]
    assert verify(open_store(root), 3).good
    assert not complaints("".join(said))


@pytest.mark.soak
@pytest.mark.distributed
def test_on_all_ranks(tmp_path: Path) -> None:
    ran = launch("system.disks.ranks_that_end", 2, tmp_path, forked=False)
    ran.check()
    assert holdfast.steps(tmp_path) == [1, 2, 3]
    assert not complaints("".join(ran.output.values()))
