"""The ends that a run may come to before `close()`: SIGTERM, and the end of Python.

At SIGTERM, on any rank, all ranks save at one step, and stop.

A script that simply ends has saves under way in threads of its own.  They get `threads.EXIT_S` seconds;
then this says what was dropped, and which saves have failed since anybody asked.  A process that is killed,
or calls `os._exit`, has no end of this kind.
"""

from __future__ import annotations

import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakMethod

from holdfast.errors import HoldfastError, HoldfastWarning, UsageError, warn_user
from holdfast.group import Group
from holdfast.patience import slowest
from holdfast.saving import Save
from holdfast.threads import at_exit, idle

# -- SIGTERM -----------------------------------------------------------------------------------------


def check_thread() -> None:
    """UsageError where no signal can be waited for: Python lets the main thread alone do it."""
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "Checkpointer(sigterm_s=...): only the main thread can wait for SIGTERM",
            hint="make the Checkpointer there, or leave sigterm_s out",
        )


class SigtermStop:
    """SIGTERM on any rank becomes one step at which all ranks save and stop.

    The rank that was told posts the next step's number; every rank that completes that step has by
    then exchanged gradients with the poster, so it finds the post and stops at the same step.
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

    def left(self) -> float:
        """Seconds of grace that are left."""
        since = time.monotonic() - self._told_at if self._told_at else 0.0
        return max(self._grace_s - since, 1.0)

    def close(self) -> None:
        signal.signal(signal.SIGTERM, self._old)


# -- the end of Python -------------------------------------------------------------------------------


LINGER_S = 3.0
"""Seconds that ranks wait for each other, so that all hear what became of the last save."""
LEAVE_S = 2.0
"""Seconds that threads have to see that nobody is waited for any more."""


class Ending:
    """The saves of a Checkpointer that nobody has closed.

    It holds no state of the training: the script may have dropped the Checkpointer long ago.
    """

    def __init__(
        self,
        group: Group,
        saves: list[Save],
        unheard: WeakMethod[Callable[[], list[str]]],
        uploads: Callable[[], list[str]],
    ) -> None:
        """`saves`: those whose end has not been told, now and at any later time.  `unheard`: what else has
        not been told.  `uploads`: what uploads have to tell; they go on when the script has dropped the
        Checkpointer."""
        self._group = group
        self._saves = saves
        self._unheard = unheard
        self._uploads = uploads
        self._cancel = at_exit(self._end)

    def close(self) -> None:
        """Cancel the ending: there is nothing left to be told."""
        self._cancel()

    def _end(self, waited_s: float) -> None:
        late = [save.step for save in self._saves if not save.done()]
        why = slowest(0.0)
        if late:
            self._group.hurry()
            idle(LEAVE_S)
        elif self._saves and self._group.size > 1:
            with suppress(HoldfastError):
                self._group.gather("ended", b"", LINGER_S)
        for text in self._texts(late, waited_s, why):
            try:
                warn_user(text)
            except (
                HoldfastWarning
            ) as error:  # as `python -W error` has it; there are others to be told
                traceback.print_exception(error)

    def _texts(self, late: list[int], waited_s: float, why: str) -> list[str]:
        unheard = self._unheard()
        texts = ([] if unheard is None else unheard()) + self._uploads()
        for save in self._saves:
            if save.step in late:
                texts.append(
                    f"Python ended before the save of step {save.step} was done, which was given "
                    f"{waited_s:.0f} s: it is dropped" + (f" ({why})" if why else "")
                )
            elif save.skipped and save.kind == "save":
                texts.append(f"the save of step {save.step} was left out: one was in flight")
            elif save.error is not None and not save.told:
                texts.append(f"the save of step {save.step} failed: {save.error}")
        return texts
