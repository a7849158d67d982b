"""The line of a run: what it owns of the runs before."""

from __future__ import annotations

from holdfast.core.checkpoint.lineage import RECENT_RUNS, is_in_line, line_from
from holdfast.core.checkpoint.names import Saved


def test_a_run_owns_what_it_went_on_from() -> None:
    line = line_from(2, 250, line_from(1, 100, (), []), [Saved(1, 100), Saved(2, 250)])
    assert line == ((2, 250), (1, 100))
    owned = [(1, 50), (1, 100), (2, 200), (2, 250), (3, 999)]
    others = [(1, 200), (2, 260), (4, 1)]
    assert all(is_in_line(Saved(*one), 3, line) for one in owned)
    assert not any(is_in_line(Saved(*one), 3, line) for one in others)


def test_runs_whose_steps_are_gone() -> None:
    """Recent ones may have left records; of older ones only those stay that have steps."""
    line: tuple[tuple[int, int], ...] = ()
    for run in range(1, 100):
        line = line_from(run, 10 * run, line, [Saved(3, 30), Saved(99, 990)])
    assert line == (*((run, 10 * run) for run in range(99, 98 - RECENT_RUNS, -1)), (3, 30))
