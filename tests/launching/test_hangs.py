"""How long is too long, from what a run has shown so far."""

from __future__ import annotations

import pytest

from holdfast.run.hangs import HANG_STEPS, LEAST_HANG_S, Progress, StepPace


class Run:
    """Ranks that do steps by a clock."""

    def __init__(self, ranks: int, asked_s: float | None = None) -> None:
        self.pace = StepPace(asked_s)
        self.now = 100.0
        self.ranks = [Progress(self.now) for _ in range(ranks)]

    def steps(self, number: int, each_s: float) -> None:
        for _ in range(number):
            self.now += each_s
            for rank in self.ranks:
                self.pace.stepped(rank, rank.step + 1, self.now)

    def hangs_after(self, seconds: float) -> bool:
        return self.pace.exceeded_s(self.ranks, self.now + seconds) is not None


def test_before_the_first_step_nothing_is_too_long() -> None:
    for asked_s in (None, 5.0):
        assert not Run(2, asked_s).hangs_after(1e6)


def test_so_many_times_the_slowest_step() -> None:
    run = Run(2)
    run.steps(1, 300.0)  # the start of a run is no step
    run.steps(5, 1.0)
    assert not run.hangs_after(LEAST_HANG_S - 1)
    assert run.hangs_after(LEAST_HANG_S + 1)
    run.steps(1, 10.0)
    run.steps(5, 1.0)
    assert not run.hangs_after(10 * HANG_STEPS - 1)
    assert run.hangs_after(10 * HANG_STEPS + 1)


def test_the_first_step_after_a_recovery_has_the_restore_before_it() -> None:
    run = Run(2)
    run.steps(1, 30.0)
    run.steps(9, 1.0)
    for rank in run.ranks:
        rank.enter(run.now)
    assert not run.hangs_after(30 * HANG_STEPS - 1)
    assert run.hangs_after(30 * HANG_STEPS + 1)


def test_a_rank_that_moves_does_not_hang_nor_do_those_that_wait_for_it() -> None:
    run = Run(3)
    run.steps(5, 1.0)
    run.ranks[1].moved = run.now + 1000
    assert not run.hangs_after(1000)
    assert run.hangs_after(1000 + LEAST_HANG_S + 1)


def test_a_limit_that_was_asked_for_is_on_steps() -> None:
    run = Run(3, asked_s=30)
    run.steps(5, 1.0)
    run.ranks[1].moved = run.now + 1000
    assert not run.hangs_after(29)
    assert run.hangs_after(31)


@pytest.mark.parametrize("asked_s", [None, 30.0])
def test_one_that_is_still_on_its_way_in_has_its_time(asked_s: float | None) -> None:
    """A new process imports and restores while the others are in their first step."""
    run = Run(2, asked_s)
    run.steps(1, 30.0)
    run.steps(5, 1.0)
    run.ranks[0].enter(run.now)
    assert not run.hangs_after(30 * HANG_STEPS - 1)


def test_nobody_is_at_work() -> None:
    run = Run(0)
    assert not run.hangs_after(1e6)
