"""SIGTERM on any rank: all ranks save at one step, and stop."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

from holdfast.base.arguments import seconds_of
from holdfast.base.errors import UsageError
from holdfast.core.group import Group


def checked_grace(given: Any, call: str) -> float:
    """Return `sigterm_s` in seconds.  UsageError outside of the main thread, where Python cannot handle
    signals."""
    grace_s = seconds_of(given, call, "sigterm_s")
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "Checkpointer(sigterm_s=...): only the main thread can handle SIGTERM",
            hint="make the Checkpointer there, or leave sigterm_s out",
        )
    return grace_s


class SigtermStop:
    """SIGTERM on any rank becomes one step at which all ranks save and stop.

    The rank that got the signal posts the next step's number.  Every rank that completes that step has
    exchanged gradients with this rank since, so it finds the post and stops at the same step.
    """

    def __init__(self, group: Group, grace_s: float) -> None:
        self._group = group
        self._grace_s = grace_s
        self._told_at: float | None = None
        self._posted = False
        self._old = signal.signal(signal.SIGTERM, self._told)

    def _told(self, *_: Any) -> None:
        self._told_at = self._told_at or time.monotonic()

    def now(self, step: int) -> bool:
        """True if this is the step to stop at."""
        found = self._group.peek("stop")
        if found is None and self._told_at is not None and not self._posted:
            self._posted = True
            at = step if self._group.size == 1 else step + 1
            self._group.post("stop", str(at).encode())
            found = str(at).encode()
        return found is not None and step >= int(found)

    def was_told(self) -> bool:
        """True on all ranks if any rank got the signal.  Collective."""
        return self._group.any(self._told_at is not None)

    def left(self) -> float:
        """Seconds that are left of `sigterm_s`, at least 1."""
        since = time.monotonic() - self._told_at if self._told_at else 0.0
        return max(self._grace_s - since, 1.0)

    def close(self) -> None:
        signal.signal(signal.SIGTERM, self._old)
