"""How long is too long, from what a run has shown so far."""

from __future__ import annotations

import pytest

from holdfast.launch.hangs import (
    HANG_STEPS,
    LEAST_HANG_S,
    OPEN_STEPS,
    SURE_S,
    RankProgress,
    StepPace,
)
from holdfast.launch.nodes import RankFailure
from holdfast.launch.repeated_failures import SAME, Failures


class Run:
    """Ranks that do steps by a clock."""

    def __init__(self, ranks: int, asked_s: float | None = None) -> None:
        self.pace = StepPace(asked_s)
        self.now = 100.0
        self.ranks = [RankProgress(self.now) for _ in range(ranks)]

    def steps(self, number: int, each_s: float) -> None:
        for _ in range(number):
            self.now += each_s
            for rank in self.ranks:
                self.pace.stepped(rank, rank.step + 1, self.now)

    def moves(self, rank: int, seconds: float, each_s: float = 1.0) -> None:
        """One rank is at something else for so long, and says so now and then."""
        until = self.now + seconds
        while self.now < until:
            self.now += each_s
            self.pace.moved(self.ranks[rank], self.now)

    def enters(self) -> None:
        for rank in self.ranks:
            rank.enter(self.now)

    def hangs_after(self, seconds: float) -> bool:
        return self.pace.exceeded_s(self.ranks, self.now + seconds) is not None


def test_before_the_first_step_nothing_is_too_long() -> None:
    assert not Run(2).hangs_after(1e6)


@pytest.mark.parametrize(("asked_s", "limit_s"), [(5.0, SURE_S), (2 * SURE_S, 2 * SURE_S)])
def test_before_the_first_step_there_is_a_limit_where_one_was_asked_for(
    asked_s: float, limit_s: float
) -> None:
    run = Run(2, asked_s)
    assert not run.hangs_after(limit_s - 1)
    assert run.hangs_after(limit_s + 1)
    run.moves(0, 2 * limit_s)  # a restore takes its time, and so do steps that nobody tells
    assert not run.hangs_after(limit_s - 1)
    assert run.hangs_after(limit_s + 1)


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


def test_until_a_second_step_the_start_is_the_measure() -> None:
    """A step may take longer than a minute, and its rank may move in the beginning alone."""
    run = Run(2)
    run.steps(1, 100.0)
    run.moves(0, 2.0)
    assert not run.hangs_after(100 * HANG_STEPS - 1)
    assert run.hangs_after(100 * HANG_STEPS + 1)


def test_an_evaluation_is_no_slow_step() -> None:
    run = Run(2)
    run.steps(9, 0.5)
    run.moves(0, 1800.0)
    run.steps(3, 0.5)
    assert not run.hangs_after(LEAST_HANG_S - 1)
    assert run.hangs_after(LEAST_HANG_S + 1)


def test_a_step_whose_rank_moves_at_its_end_is_still_before() -> None:
    run = Run(2)
    run.steps(2, 1.0)
    run.now += 30.0
    run.moves(0, 1.0)
    run.steps(1, 1.0)
    assert not run.hangs_after(30 * HANG_STEPS - 1)


def test_only_a_step_shows_that_ranks_did_not_hang_before() -> None:
    """One that fails may move on its way to the collective in which all hang."""
    run = Run(2)
    run.steps(5, 1.0)
    run.moves(0, 11.0, each_s=11.0)
    assert run.hangs_after(LEAST_HANG_S + 1)
    run.moves(0, 50.0, each_s=50.0)
    assert not run.hangs_after(50 * OPEN_STEPS - 1)
    assert run.hangs_after(50 * OPEN_STEPS + 1)
    run.enters()
    run.pace.go_on(run.now)
    run.steps(2, 1.0)
    run.moves(0, 11.0, each_s=11.0)
    run.steps(1, 1.0)
    assert not run.hangs_after(11 * HANG_STEPS - 1)
    assert run.hangs_after(11 * HANG_STEPS + 1)


def test_the_first_step_after_a_recovery_has_the_restore_before_it() -> None:
    run = Run(2)
    run.steps(1, 30.0)
    run.steps(9, 1.0)
    run.enters()
    assert not run.hangs_after(30 * HANG_STEPS - 1)
    assert run.hangs_after(30 * HANG_STEPS + 1)


def test_after_a_recovery_a_limit_that_was_asked_for_leaves_time_for_the_start() -> None:
    """Some times as much as the first took, but no more than half an hour beside what was asked for."""
    run = Run(2, asked_s=20)
    run.steps(1, 30.0)
    run.steps(9, 1.0)
    run.enters()
    assert not run.hangs_after(30 * HANG_STEPS - 1)
    assert run.hangs_after(30 * HANG_STEPS + 1)


def test_a_rank_that_moves_does_not_hang_nor_do_those_that_wait_for_it() -> None:
    run = Run(3)
    run.steps(5, 1.0)
    run.moves(1, 1000.0)
    assert not run.hangs_after(LEAST_HANG_S - 1)
    assert run.hangs_after(LEAST_HANG_S + 1)


def test_a_limit_that_was_asked_for_is_on_steps() -> None:
    run = Run(3, asked_s=30)
    run.steps(5, 1.0)
    run.moves(1, 20.0)
    assert not run.hangs_after(9)
    assert run.hangs_after(11)


@pytest.mark.parametrize(
    ("asked_s", "limit_s"), [(None, 30.0 * HANG_STEPS), (30.0, 30.0 * HANG_STEPS)]
)
def test_one_that_is_still_on_its_way_in_has_its_time(
    asked_s: float | None, limit_s: float
) -> None:
    """A new process imports and restores while the others are in their first step."""
    run = Run(2, asked_s)
    run.steps(1, 30.0)
    run.steps(5, 1.0)
    run.ranks[0].enter(run.now)
    assert not run.hangs_after(limit_s - 1)


def test_what_comes_between_attempts_is_no_measure() -> None:
    """Ranks that have left are heard, too, while nodes wait for each other."""
    run = Run(2)
    run.steps(5, 1.0)
    run.pace.rest()
    run.moves(0, 300.0, each_s=150.0)
    run.enters()
    run.pace.go_on(run.now)
    run.steps(2, 1.0)
    assert run.pace.limit_s(run.ranks[0]) == LEAST_HANG_S


def test_nobody_is_at_work() -> None:
    run = Run(0)
    assert not run.hangs_after(1e6)


def test_the_limit_doubles_after_a_hang_that_may_be_none() -> None:
    run, limits = Run(2), []
    run.steps(5, 1.0)
    while not run.pace.is_sure(limit_s := run.pace.limit_s(run.ranks[0])):
        limits.append(limit_s)
        run.pace.doubt(limit_s)
        run.enters()
        run.steps(2, 1.0)
    assert limits == [60.0, 120.0, 240.0, 480.0, 960.0]
    assert limit_s == 1920.0
    assert StepPace(5.0).is_sure(5.0)  # the user's word


def test_hangs_that_may_be_none_are_not_the_same_failure() -> None:
    hang, failures = (
        RankFailure(0, 100, 1000, "it hangs", is_sure=False, doubtful_s=60.0),
        Failures(),
    )
    for _ in range(2 * SAME):
        failures.note(hang, "node", 0, 1.0)
    assert not failures.are_same and not failures.are_of_a_slot and not failures.are_of_a_node
    for _ in range(SAME):
        assert not failures.are_same
        failures.note(RankFailure(0, 100, 1000, "it hangs", is_sure=False), "node", 0, 2000.0)
    assert failures.are_same
