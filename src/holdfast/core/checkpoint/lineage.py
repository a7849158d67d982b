"""The line of a run: the runs that it continues, each with the last step that it took from there.

    run 1    100 200 300          began in an empty root               line ()
    run 2        200 250          went on from step 100 of run 1       line (1, 100)
    run 3            250 260      went on from step 250 of run 2       line (2, 250) (1, 100)
    run 4    1 2 3                begins anew, beside all of these     line ()

A run deletes only steps of its line: run 3 deletes those of run 1 up to 100, of run 2 up to 250, and its
own, but not step 300, from which run 2 turned away.  Run 4 deletes only its own.  A manifest states the
line of its run, so that a restart knows it wherever the step was copied to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from holdfast.core.checkpoint.names import Saved

Lineage = tuple[tuple[int, int], ...]
"""Runs, each with its last step that counts; newest first."""

RECENT_RUNS = 16
"""Runs that stay in a line without steps: they may have left records that later runs delete."""

Owns = Callable[[Saved], bool]
"""True for a step, or the first step of a file of records, that a run may delete."""


def line_from(run: int, step: int, line: Lineage, there: Iterable[Saved]) -> Lineage:
    """Return the line of a run that continues from `step` of `run`, whose line is `line`.  Runs without
    steps in `there` are left out, except recent ones."""
    saved = list(there)

    def has_steps(of_run: int, last: int) -> bool:
        return any(s.run == of_run and s.step <= last for s in saved)

    before = [pair for pair in line if pair[0] != run]
    return (
        (run, step),
        *before[:RECENT_RUNS],
        *(pair for pair in before[RECENT_RUNS:] if has_steps(*pair)),
    )


def is_in_line(saved: Saved, run: int, line: Lineage) -> bool:
    """True if a step belongs to the run or its line."""
    return saved.run == run or any(saved.run == r and saved.step <= last for r, last in line)
