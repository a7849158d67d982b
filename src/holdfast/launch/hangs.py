"""Hangs: ranks that make no progress, by what their launcher hears of them.

A rank says which steps it has done (`Checkpointer.step`); where it does none for a while, it says that it
moves: its main thread is elsewhere in the script than before, holdfast reads and writes, or processes that
it has begun compute.  So an evaluation, or a save that training waits for, is none that hangs, however long
the steps are not.  A rank that hangs neither steps nor moves, and soon no other does: all wait for it in a
collective.

How long is too long, the run itself shows: so many times the longest that all were still between steps so
far.  What comes before the first step of an attempt, a restore above all, has a measure of its own, for it
is no step.

Ranks that are alike, none stopped and none behind, may also wait for something that this cannot see, such
as an upload.  After such a hang the limit doubles, until it is so long that there is no doubt.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

HANG_STEPS = 20
"""Ranks hang that are still for so many times the longest that they were between steps so far."""
OPEN_STEPS = 5
"""The same, of what they were still since the newest step: it may be a part of the hang."""
LEAST_HANG_S = 60.0
SURE_S = 1800.0
"""Ranks that do nothing for so long hang, though they are alike, or have never done a step."""


@dataclass
class Progress:
    """The progress of one rank."""

    since: float
    """When it was heard to have done its last step, or entered."""
    step: int = 0
    """The last step that it has done, in this attempt or in one before."""
    moved: float = 0.0
    """When it was heard last to be at something else than before, without having done a step."""
    has_stepped: bool = False
    """It has done a step in this attempt."""

    def enter(self, now: float) -> None:
        """Begin an attempt."""
        self.since, self.has_stepped = now, False

    @property
    def reached(self) -> int:
        """The last step that it has done in this attempt; 0 before the first."""
        return self.step if self.has_stepped else 0


class StepPace:
    """The time that steps of a run take."""

    def __init__(self, asked_s: float | None) -> None:
        """`asked_s`: the limit that the user has set; it is on steps alone, once there are some."""
        self.asked_s = asked_s
        self._still_s = 0.0
        """The longest that all ranks were still before one that is at its steps was heard, up to the newest
        step: only that shows that they did not hang."""
        self._since_step_s = 0.0
        """The same since then."""
        self._start_s = 0.0
        """The longest from entering to the first step."""
        self._is_measured = False
        """Some step was done after the first of an attempt."""
        self._heard = -math.inf
        """When any rank was heard last."""
        self._least_s = LEAST_HANG_S
        self._is_measuring = True

    def rest(self) -> None:
        """Measure nothing from now on: ranks leave, or hang, and nodes wait for each other."""
        self._is_measuring = False

    def go_on(self, now: float) -> None:
        """Measure again: an attempt has begun."""
        self._is_measuring, self._heard, self._since_step_s = True, now, 0.0

    def stepped(self, progress: Progress, step: int, now: float) -> None:
        """Note that a rank has done a step."""
        self._hear(progress, now)
        if progress.has_stepped:
            self._is_measured = True
            self._still_s, self._since_step_s = max(self._still_s, self._since_step_s), 0.0
        elif self._is_measuring:
            self._start_s = max(self._start_s, now - progress.since)
        progress.step, progress.since, progress.has_stepped = step, now, True

    def moved(self, progress: Progress, now: float) -> None:
        """Note that a rank is at something else than before."""
        self._hear(progress, now)
        progress.moved = now

    def _hear(self, progress: Progress, now: float) -> None:
        """Note how long nobody was heard: an evaluation on one rank is no long step of the others."""
        if progress.has_stepped and self._is_measuring:
            self._since_step_s = max(self._since_step_s, now - self._heard)
        self._heard = now

    def is_sure(self, limit_s: float) -> bool:
        """Tell whether ranks that are alike, and were still for `limit_s`, hung without a doubt."""
        return self.asked_s is not None or limit_s >= SURE_S

    def doubt(self, limit_s: float) -> float:
        """Double a limit that ranks have exceeded that may have been at work; return the new one."""
        self._least_s = max(self._least_s, 2 * limit_s)
        return self._least_s

    def limit_s(self, progress: Progress) -> float:
        """Return the seconds without progress that are too long for a rank.

        Before the first step of the run, of which nobody knows yet what it takes, there is a limit only
        where the user has asked for one.
        """
        if self.asked_s is not None:
            if progress.has_stepped:
                return self.asked_s
            longest_s = min(SURE_S, HANG_STEPS * self._start_s) if self._start_s else SURE_S
            return max(self.asked_s + self._start_s, longest_s)
        if not self._start_s:
            return math.inf
        is_measured = progress.has_stepped and self._is_measured
        longest_s = self._still_s if is_measured else max(self._start_s, self._still_s)
        return max(self._least_s, HANG_STEPS * longest_s, OPEN_STEPS * self._since_step_s)

    def exceeded_s(self, running: Collection[Progress], now: float) -> float | None:
        """Return the limit that all ranks that are at work have exceeded; None if some has not."""
        if not running:
            return None
        limit_s = max(map(self.limit_s, running))
        last = max(map(self._last, running))
        return limit_s if now - last > limit_s else None

    def _last(self, progress: Progress) -> float:
        """Return when a rank was heard last, of what counts for its limit."""
        is_on_steps = self.asked_s is not None and progress.has_stepped
        return progress.since if is_on_steps else max(progress.since, progress.moved)
