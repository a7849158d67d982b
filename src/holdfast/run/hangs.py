"""Hangs: ranks that make no progress, by what their launcher hears of them.

A rank says which steps it has done (`Checkpointer.step`); where it does none for a while, it says that it
moves: its main thread is elsewhere in the script than before, or holdfast reads and writes.  So an
evaluation, or a save that training waits for, is none that hangs, however long the steps are not.  A rank
that hangs neither steps nor moves, and soon no other does: all wait for it in a collective.

How long is too long, the run itself shows: so many times the slowest step so far.  What comes before the
first step of an attempt, a restore above all, has a measure of its own, for it is no step.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

HANG_STEPS = 20
"""Ranks hang that take so many times the slowest step so far."""
LEAST_HANG_S = 60.0


@dataclass
class Progress:
    """The progress of one rank."""

    since: float
    """When it was heard to have done its last step, or entered."""
    step: int = 0
    moved: float = 0.0
    """When it was heard last to be at something else than before, without having done a step."""
    has_stepped: bool = False
    """It has done a step in this attempt."""

    def enter(self, now: float) -> None:
        """Begin an attempt."""
        self.since, self.has_stepped = now, False


class StepPace:
    """The time that steps of a run take."""

    def __init__(self, asked_s: float | None) -> None:
        """`asked_s`: the limit that the user has set; it is on steps alone."""
        self.asked_s = asked_s
        self._step_s = 0.0
        """The longest that a step took."""
        self._start_s = 0.0
        """The longest from entering to the first step."""

    def stepped(self, progress: Progress, step: int, now: float) -> None:
        """Note that a rank has done a step."""
        took_s = now - progress.since
        if progress.has_stepped:
            self._step_s = max(self._step_s, took_s)
        else:
            self._start_s = max(self._start_s, took_s)
        progress.step, progress.since, progress.has_stepped = step, now, True

    def limit_s(self, progress: Progress) -> float:
        """Return the seconds without a step that are too long for a rank.

        None are before the first step of the run: nobody knows yet what it takes.
        """
        if progress.has_stepped:
            return self.asked_s or max(LEAST_HANG_S, HANG_STEPS * self._step_s)
        if not self._start_s:
            return math.inf
        return max(self.asked_s or LEAST_HANG_S, HANG_STEPS * max(self._start_s, self._step_s))

    def exceeded_s(self, running: Collection[Progress], now: float) -> float | None:
        """Return the limit that all ranks that are at work have exceeded; None if some has not."""
        if not running:
            return None
        limit_s = max(map(self.limit_s, running))
        last = max(p.since if self.asked_s else max(p.since, p.moved) for p in running)
        return limit_s if now - last > limit_s else None
