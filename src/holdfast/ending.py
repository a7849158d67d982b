"""The end of Python before `close()`.

A script that simply ends has saves under way in threads of its own.  They get `threads.EXIT_S` seconds;
then this says what was dropped, and which saves have failed since anybody asked.  A process that is killed,
or calls `os._exit`, has no end of this kind.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakMethod

from holdfast.errors import HoldfastError, HoldfastWarning, warn_user
from holdfast.group import Group
from holdfast.patience import slowest
from holdfast.saving import Save
from holdfast.threads import at_exit, idle

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
