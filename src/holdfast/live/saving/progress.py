"""What a tier has kept last, and what is under way there, for `Checkpointer.status`.

A tier has one `TierProgress`.  Whoever keeps a step there says so, on any thread; whoever asks gets a copy
at once, for nothing here waits for a save, for storage or for another rank.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

from holdfast.live.saving.handle import Save, error_text


@dataclass(frozen=True, slots=True)
class TierStatus:
    """How far a tier has come, as this rank knows it."""

    step: int | None = None
    """The step that it has kept last; None if it has none of this run."""
    since: float | None = None
    """When it had that step, in seconds since the epoch; None if that is unknown."""
    seconds: float | None = None
    """Seconds that its last save took, from the call to the commit; None before the first."""
    bytes: int | None = None
    """Bytes of this rank's part of that save."""
    under_way: tuple[int, ...] = ()
    """Steps on their way there, in the order of their calls."""
    error: str | None = None
    """The failure of the last save that has ended; None if it succeeded."""

    @property
    def age_s(self) -> float | None:
        """Seconds since it has that step; None if that is unknown."""
        return None if self.since is None else max(time.time() - self.since, 0.0)


class TierProgress:
    """The status of a tier, as it changes.  Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = TierStatus()

    @property
    def status(self) -> TierStatus:
        """The status now."""
        return self._last

    def watch(self, save: Save) -> None:
        """Follow a save of this tier to its end."""
        self.begin(save.step)
        save.add_done_callback(self._ended)

    def watch_through(self, save: Save) -> None:
        """Follow a save that goes on to another tier; `keep` says when it has come here."""
        self.begin(save.step)
        save.add_done_callback(lambda ended: self.leave(ended.step))

    def _ended(self, save: Save) -> None:
        if save.error is not None:
            self.fail(save.step, error_text(save.error))
        elif save.skipped:
            self.leave(save.step)
        else:
            self.keep(save.step, save.seconds, save.image_bytes)

    def begin(self, step: int) -> None:
        """Note that a step is on its way."""
        with self._lock:
            self._last = replace(self._last, under_way=(*self._last.under_way, step))

    def keep(self, step: int, seconds: float | None, num_bytes: int) -> None:
        """Note that a step has been kept."""
        with self._lock:
            rest = _without(self._last.under_way, step)
            self._last = TierStatus(step, time.time(), seconds, num_bytes, rest)

    def fail(self, step: int, error: str) -> None:
        """Note that a step could not be kept."""
        with self._lock:
            rest = _without(self._last.under_way, step)
            self._last = replace(self._last, under_way=rest, error=error)

    def failed(self, error: str) -> None:
        """Note that a try has failed of a step which stays on its way."""
        with self._lock:
            self._last = replace(self._last, error=error)

    def leave(self, step: int) -> None:
        """Note that a step is no longer on its way, whatever has become of it."""
        with self._lock:
            rest = _without(self._last.under_way, step)
            self._last = replace(self._last, under_way=rest)

    def found(self, step: int, since: float | None) -> None:
        """Note that a restart has found a step there, and went on from it."""
        with self._lock:
            self._last = replace(self._last, step=step, since=since)


def _without(steps: tuple[int, ...], step: int) -> tuple[int, ...]:
    """Return steps without the first occurrence of one."""
    at = steps.index(step) if step in steps else len(steps)
    return steps[:at] + steps[at + 1 :]
