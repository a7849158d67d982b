"""Whatever fails on one node: the run goes on in place, or ends with a clear word; nothing is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import holdfast
from launching.soaked import RANKS, Soaked, children, soaked, trajectory

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.soak]

STEPS = 30
WORDS = ("--tiers=memory,durable", f"--steps={STEPS}")
ENDLESS = ("--tiers=memory,durable",)
"""What a run is given that ends when it is told to."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], str]:
    """The states of a run that nothing befalls."""
    return trajectory(tmp_path_factory.mktemp("whole") / "root", STEPS)


def check(run: Soaked, expected: dict[tuple[int, int], str]) -> None:
    """Every state that was restored or reached is the one of the uninterrupted run, as far as that went."""
    states = [t for t in run.told if "state" in t and t["state"] <= STEPS]
    assert states
    assert not [t for t in states if t["digest"] != expected[t["rank"], t["state"]]]


def processes(run: Soaked, attempt: int) -> dict[int, int]:
    """Return the process of each rank in an attempt."""
    return {t["rank"]: t["pid"] for t in run.told if t["attempt"] == attempt and "begins" in t}


# -- in the training process --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "lost", "text"),
    [
        ({"kill": (1, 2)}, {1, 2}, "it was killed by SIGKILL"),
        ({"kill": (0, 1, 2, 3)}, {0, 1, 2, 3}, "it was killed by SIGKILL"),
        ({"raise": (3,)}, set(), "ValueError: a fault at step 20"),
        ({"raise": (1,), "kill": (2,)}, {2}, "it was killed by SIGKILL"),
        ({"exit": (2,)}, {2}, "it ended with 3"),
        ({"stop": (0,)}, {0}, "to blame: local rank 0"),
        ({"wait": (2,)}, {2}, "to blame: local rank 2"),
    ],
    ids=["two", "all", "raises", "raises-and-dies", "exits", "stopped", "waits"],
)
def test_ranks_that_fail(
    kinds: dict[str, tuple[int, ...]],
    lost: set[int],
    text: str,
    tmp_path: Path,
    expected: dict[tuple[int, int], str],
) -> None:
    fails = [f"--fail {kind} {rank} 20 1" for kind, ranks in kinds.items() for rank in ranks]
    words = (*WORDS, *" ".join(fails).split())
    with soaked(tmp_path / "root", *words, options=("--spares=1", "--hang-s=10")) as run:
        run.finishes()
        run.nothing_is_left()
    check(run, expected)
    assert text in run.printed
    first, last = processes(run, 1), processes(run, run.attempt)
    if lost != set(range(RANKS)) and "wait" not in kinds:
        assert {r for r in first if first[r] != last[r]} == lost
    assert run.last_step == STEPS


def test_the_stacks_of_ranks_that_hang(tmp_path: Path) -> None:
    """They are told with the rank, and show where it waits."""
    words = (*WORDS, *["--fail", "wait", "2", "20", "1"])
    with soaked(tmp_path / "root", *words, options=("--hang-s=10",)) as run:
        run.finishes()
        run.nothing_is_left()
    of_rank = run.printed.partition("stacks of local rank 2 (process")[2]
    assert 'trajectory.py", line' in of_rank
    assert "in befall" in of_rank.partition("stacks of local rank 3")[0]


def test_a_rank_that_does_not_return_with_the_others(tmp_path: Path) -> None:
    with soaked(tmp_path / "root", *WORDS, "--linger", options=("--hang-s=10",)) as run:
        run.finishes()
        run.nothing_is_left()
    assert "no rank has done a step for 10 s" in run.printed
    assert "stacks of local rank 1" in run.printed
    assert run.attempt == 2


def test_an_error_is_not_told_of_a_later_failure(tmp_path: Path) -> None:
    words = (*WORDS, *["--fail", "raise", "1", "10", "1", "--fail", "kill", "1", "20", "1"])
    with soaked(tmp_path / "root", *words, options=("--max-restarts=1",)) as run:
        assert run.process.wait(300) == 1
        run.until_gone()  # the agent stays, with the snapshots of a run that has failed
    first, last = run.printed.split("failed after step")[1:]
    assert "ValueError: a fault at step 10" in first
    assert "SIGKILL" in last
    assert "ValueError" not in last


def test_the_same_failure_three_times(tmp_path: Path) -> None:
    with soaked(tmp_path / "root", *WORDS, *["--fail", "raise", "2", "20", "9"]) as run:
        assert run.process.wait(300) == 1
        run.until_gone()  # the agent stays, with the snapshots of a run that has failed
    assert "rank 2" in run.printed
    assert "after step 19: ValueError: a fault at step 20" in run.printed
    assert "3rd time in the same way" in run.printed
    assert 'raise ValueError(f"a fault at step {step}")' in run.printed


# -- beside it ----------------------------------------------------------------------------------------


def spare_of(run: Soaked) -> int:
    """Wait for a spare; return its process."""
    ranks = set(run.until(run.stepping, "all do a step").values())

    def found() -> set[int]:
        return set(run.forked()) - ranks

    return int(run.until(found, "there is a spare").pop())


def test_a_spare_that_is_killed(tmp_path: Path, expected: dict[tuple[int, int], str]) -> None:
    """Training does not notice; there is another one, and it serves."""
    with soaked(tmp_path / "root", *ENDLESS, options=("--spares=1",)) as run:
        first = spare_of(run)
        run.kill(first)
        run.until(lambda: "a spare (process" in run.printed, "it is told")
        second = spare_of(run)
        assert second != first and run.attempt == 1
        run.until(lambda: run.waits(second), "it waits")
        run.kill(run.stepping()[1])
        ranks = run.until(lambda: run.stepping(1), "all go on")
        assert ranks[1] == second
        assert run.finish() == 0
        run.nothing_is_left()
    check(run, expected)


def test_spares_that_end_are_not_forked_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are they given the RANK that the launcher's environment has: here they end if they have none."""
    monkeypatch.setenv("RANK", "0")
    with soaked(tmp_path / "root", *ENDLESS, "--bad-spares", options=("--spares=1",)) as run:
        run.until(lambda: "no spare is forked" in run.printed, "it gives up")
        time.sleep(0.5)
        assert run.printed.count("a spare (process") == 3
        assert "it ended with 4" in run.printed
        assert run.finish() == 0


def test_the_fork_server_is_killed(tmp_path: Path) -> None:
    with soaked(tmp_path / "root", *ENDLESS, options=("--spares=1",)) as run:
        run.until(run.stepping, "all do a step")
        (server,) = children(run.process.pid)
        os.kill(server, signal.SIGKILL)
        assert run.process.wait(120) == 1
        assert f"the fork server, process {server}" in run.printed
        assert "Traceback" not in run.printed.partition("the fork server")[2]
        run.until_gone()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_launcher_is_ended(number: signal.Signals, tmp_path: Path) -> None:
    with soaked(tmp_path / "root", *ENDLESS, options=("--spares=1",)) as run:
        run.until(run.stepping, "all do a step")
        run.process.send_signal(number)
        status = run.process.wait(120)
        assert status == (-number if number == signal.SIGKILL else 128 + number)
        run.until_gone()


def agent_of(run: Soaked) -> int:
    """Return the process of the agent of the memory tier."""
    card = msgspec.json.decode((run.memory / "agent.json").read_bytes())
    return int(card["pid"])


@pytest.mark.parametrize("is_with_a_rank", [False, True])
def test_the_agent_is_killed(
    is_with_a_rank: bool, tmp_path: Path, expected: dict[tuple[int, int], str]
) -> None:
    with soaked(tmp_path / "root", *ENDLESS, options=("--spares=1",)) as run:
        ranks = run.until(run.stepping, "all do a step")
        run.until(lambda: holdfast.steps(run.root), "a step is in storage")
        os.kill(agent_of(run), signal.SIGKILL)
        if is_with_a_rank:
            run.kill(ranks[2])
            run.until(lambda: run.stepping(1), "all go on")
        else:
            step = run.last_step
            run.until(lambda: run.last_step > step + 20, "it goes on")
            assert run.attempt == 1
        assert run.finish() == 0
        run.nothing_is_left()
    check(run, expected)
    assert run.attempt == 1 + is_with_a_rank
    begins = [t for t in run.told if t["attempt"] == 2 and "begins" in t]
    assert all(t["begins"] > 0 for t in begins)


# -- memory -------------------------------------------------------------------------------------------


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group whose processes may have 3 GiB together."""
    parent = Path("/sys/fs/cgroup")
    name, limit = f"holdfast-test-{os.getpid()}", "memory.max"
    if (parent / "memory").is_dir():
        parent, limit = parent / "memory", "memory.limit_in_bytes"
    group = parent / name
    try:
        group.mkdir()
        (group / limit).write_text(str(3 << 30))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no memory control group can be made here: {error}")
    yield group
    stop = time.monotonic() + 60
    while (group / "cgroup.procs").read_text() and time.monotonic() < stop:
        time.sleep(0.1)
    group.rmdir()


def test_out_of_memory(
    memory_group: Path, tmp_path: Path, expected: dict[tuple[int, int], str]
) -> None:
    """The kernel kills the rank that takes too much; the others go on in place."""
    words = (*WORDS, *["--fail", "hoard", "2", "20", "1"])
    with soaked(tmp_path / "root", *words, options=("--spares=1",), group=memory_group) as run:
        run.finishes()
        run.nothing_is_left()
    check(run, expected)
    assert "it was killed by SIGKILL" in run.printed
    first, last = processes(run, 1), processes(run, run.attempt)
    assert {r for r in first if first[r] != last[r]} == {2}
