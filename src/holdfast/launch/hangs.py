"""Hangs: ranks that make no progress, judged by their messages to the launcher.

A rank reports its steps (`Checkpointer.step`).  Without a step for a while, it reports that it moves: its
main thread is at another place in the script than before, holdfast reads or writes, or its child processes
compute.  So a long evaluation, or a save that training waits for, is no hang.  A rank that hangs neither
steps nor moves, and soon no other rank does, since all wait for it in a collective.

The limit is a multiple of the longest pause between steps in this run so far.  The time before the first
step of an attempt, mostly a restore, is measured separately, since it is no step.

If no rank is stopped and none is behind the others, they may also wait for something that the launcher
cannot see, such as an upload.  After such a doubtful hang the limit doubles, until it is so long that there
is no doubt.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

HANG_STEPS = 20
"""The limit, as a multiple of the longest pause between steps so far."""
OPEN_STEPS = 5
"""The limit, as a multiple of the longest pause since the newest step: that may be part of the hang."""
LEAST_HANG_S = 60.0
SURE_S = 1800.0
"""Ranks that do nothing for this long hang without doubt, even if none is behind or none has done a
step."""


@dataclass
class RankProgress:
    """The progress of one rank."""

    since: float
    """When the rank reported its last step, or entered the attempt."""
    step: int = 0
    """The last step that the rank has done, in this attempt or an earlier one."""
    moved: float = 0.0
    """When the rank last reported movement without a step."""
    has_stepped: bool = False
    """The rank has done a step in this attempt."""

    def enter(self, now: float) -> None:
        """Begin an attempt."""
        self.since, self.has_stepped = now, False

    @property
    def reached(self) -> int:
        """The last step of this attempt; 0 before the first."""
        return self.step if self.has_stepped else 0


class StepPace:
    """The time that steps of a run take."""

    def __init__(self, asked_s: float | None) -> None:
        """`asked_s`: the user's limit; from the first step on it counts steps alone, not movement."""
        self.asked_s = asked_s
        self._still_s = 0.0
        """The longest time without a message from a rank that has stepped, up to the newest step: a step
        proves that the pause before it was no hang."""
        self._since_step_s = 0.0
        """The longest such time since the newest step."""
        self._start_s = 0.0
        """The longest time from entering to the first step."""
        self._is_measured = False
        """A rank has done at least two steps in one attempt."""
        self._heard = -math.inf
        """When the last message of any rank came."""
        self._least_s = LEAST_HANG_S
        self._is_measuring = True

    def rest(self) -> None:
        """Stop measuring: ranks leave or hang, and nodes wait for each other."""
        self._is_measuring = False

    def go_on(self, now: float) -> None:
        """Measure again: an attempt has begun."""
        self._is_measuring, self._heard, self._since_step_s = True, now, 0.0

    def stepped(self, progress: RankProgress, step: int, now: float) -> None:
        """Note that a rank has done a step."""
        self._hear(progress, now)
        if progress.has_stepped:
            self._is_measured = True
            self._still_s, self._since_step_s = max(self._still_s, self._since_step_s), 0.0
        elif self._is_measuring:
            self._start_s = max(self._start_s, now - progress.since)
        progress.step, progress.since, progress.has_stepped = step, now, True

    def moved(self, progress: RankProgress, now: float) -> None:
        """Note that a rank has moved."""
        self._hear(progress, now)
        progress.moved = now

    def _hear(self, progress: RankProgress, now: float) -> None:
        """Note the time since any rank's last message: while one rank evaluates, the others do not hang."""
        if progress.has_stepped and self._is_measuring:
            self._since_step_s = max(self._since_step_s, now - self._heard)
        self._heard = now

    def is_sure(self, limit_s: float) -> bool:
        """Tell whether ranks hung without doubt that did nothing for `limit_s`, none of them behind."""
        return self.asked_s is not None or limit_s >= SURE_S

    def doubt(self, limit_s: float) -> float:
        """Double the limit `limit_s`, since ranks that exceeded it may have been at work; return the new
        one."""
        self._least_s = max(self._least_s, 2 * limit_s)
        return self._least_s

    def limit_s(self, progress: RankProgress) -> float:
        """Return the limit in seconds without progress for a rank.

        Before the first step of the run nobody knows how long a step takes: there is a limit only if the
        user has set one.
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

    def exceeded_s(self, running: Collection[RankProgress], now: float) -> float | None:
        """Return the limit that all running ranks have exceeded; None if any of them has not."""
        if not running:
            return None
        limit_s = max(map(self.limit_s, running))
        last = max(map(self._last, running))
        return limit_s if now - last > limit_s else None

    def _last(self, progress: RankProgress) -> float:
        """Return when a rank last made the progress that its limit counts."""
        is_on_steps = self.asked_s is not None and progress.has_stepped
        return progress.since if is_on_steps else max(progress.since, progress.moved)
