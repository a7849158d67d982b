"""The ends of saves, and the end of Python before `close()`.

The next call of the script reports how a save has ended.  A script that simply ends makes no such call, and
may leave saves under way in background threads.  They get `threads.EXIT_S` seconds; then `Ending` reports
the saves that were dropped, and failures that were not reported yet.  Nothing of this happens in a process
that is killed or calls `os._exit`.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakMethod, WeakSet

from holdfast.base.errors import (
    FormatError,
    HoldfastError,
    HoldfastWarning,
    NotFound,
    StoreError,
    warn_user,
)
from holdfast.base.notices import Notices
from holdfast.base.storage_deadlines import slowest
from holdfast.base.threads import at_exit, idle
from holdfast.core.group import Group
from holdfast.live.saving import Save
from holdfast.live.state.recognising import State

LINGER_S = 3.0
"""Seconds that ranks wait for each other, so that all learn how the last save has ended."""
LEAVE_S = 2.0
"""Seconds in which threads must notice that waits were aborted."""


opened: WeakSet[Any] = WeakSet()
"""All Checkpointers of the process, also closed ones."""


class Saves:
    """The saves of a Checkpointer whose end was not reported, and the calls due at commits.  For one
    thread."""

    def __init__(self, group: Group, notices: Notices) -> None:
        self._group = group
        self._notices = notices
        self.in_vain = NotesInVain(notices)
        self.numbers = FrozenNumbers(notices)
        self.untold: list[Save] = []
        """Saves under way, and saves that have ended since the last look back."""
        self.calls: list[Callable[[int], object]] = []
        """Functions of the script, which are called with the step of each commit."""
        self._due: list[tuple[Callable[[int], object], int]] = []
        """Calls that are still to be made, in order, each with its step."""

    def look_back(self) -> None:
        """Note how saves have ended, and make the calls for those that are committed."""
        done = [s for s in self.untold if s.done()]
        self.untold[:] = [s for s in self.untold if s not in done]  # others may have ended since
        for save in done:
            if save.skipped and save.kind == "save":  # the next snapshot is a few steps away
                self._notices.warn(f"the save of step {save.step} was left out: one was in flight")
            if save.error is not None and not save.told and not self._group.lost:
                self._notices.complain(save.error)  # of a lost rank the launcher tells, once
            if save.error is None and not save.skipped and save.kind == "save":
                self._due += [(call, save.step) for call in self.calls]
        while self._due:
            call, step = self._due.pop(0)
            try:
                call(step)
            except Exception as error:
                text = (
                    f"the function of on_commit() failed at step {step}, which is saved: {error!r}"
                )
                self._notices.complain(error, text)

    def rehearsed(self, save: Save) -> None:
        """Also wait for a rehearsal, and report its end; for storage the first save does that."""
        if save.kind != "save":
            self.untold.append(save)

    def wait(self, until: float | None) -> None:
        """Wait until all have ended; Deadline at `until`, in seconds of `time.monotonic`."""
        for save in list(self.untold):
            told = save.told
            try:
                save.wait(None if until is None else max(until - time.monotonic(), 0.0))
            except Exception:
                if not save.done():
                    raise
                save.told = told  # if not yet, it is reported with the next look back


class Ending:
    """The saves of a Checkpointer that nobody has closed.

    It holds no state of the training: the script may have dropped the Checkpointer long ago.
    """

    def __init__(
        self,
        group: Group,
        saves: list[Save],
        unheard: Callable[[], list[str]],
        outliving: list[Callable[[], list[str]]],
    ) -> None:
        """`saves`: the live list of saves whose end was not reported.  `unheard`: a method of the
        Checkpointer, which returns other texts to report.  `outliving`: the same for work that goes on
        after the script has dropped the Checkpointer."""
        self._group = group
        self._saves = saves
        self._unheard = WeakMethod(unheard)
        opened.add(unheard.__self__)  # type: ignore[attr-defined]
        self._outliving = outliving
        self.is_closed = False
        self._cancel = at_exit(self._end)

    def close(self) -> None:
        """Cancel the ending: there is nothing left to report."""
        self.is_closed = True
        self._cancel()

    def _end(self, waited_s: float) -> None:
        late = [save.step for save in self._saves if not save.done()]
        why = slowest(0.0)
        if late:
            self._group.abort_waits()
            idle(LEAVE_S)
        elif self._saves and self._group.size > 1:
            with suppress(HoldfastError):
                self._group.gather("ended", b"", LINGER_S)
        for text in self._texts(late, waited_s, why):
            try:
                warn_user(text)
            except HoldfastWarning as error:  # under `python -W error`; the other texts follow
                traceback.print_exception(error)

    def _texts(self, late: list[int], waited_s: float, why: str) -> list[str]:
        unheard = self._unheard()
        texts = [] if unheard is None else unheard()
        texts += [text for tell in self._outliving for text in tell()]
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


class NotesInVain:
    """Reports labels and metrics of steps that were not saved, or that storage did not take, like failed
    saves, without ending the training."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._begun: set[int] = set()
        """Steps of which a durable save has begun."""
        self._first = self._last = self._now = -1
        """The lowest and the highest step that the script has come to, and the last one."""

    @property
    def last(self) -> int | None:
        """The last step that the script has come to; None before the first."""
        return None if self._now < 0 else self._now

    def at(self, step: int) -> None:
        """Note that the script was at a step."""
        self._first = step if self._first < 0 else min(step, self._first)
        self._last, self._now = max(step, self._last), step

    def begun(self, step: int) -> None:
        """Note that a save of a step has begun."""
        self.at(step)
        self._begun.add(step)

    @contextmanager
    def told(self, what: Callable[[], str], step: int | str | None = None) -> Iterator[None]:
        """A block that writes a label or metrics of a step, named by its number or a label.  `what()`: the
        text that this was not done.

        Reports StoreError and FormatError; once, for a step at which no save was due.  Raises NotFound for
        a step that the script has never come to, or a label that does not exist.
        """
        try:
            yield
        except (StoreError, FormatError) as error:
            is_known = step is None or (
                not isinstance(step, str) and self._first <= step <= self._last
            )
            if isinstance(error, NotFound) and not is_known:
                raise
            if isinstance(error, NotFound) and step is not None and step not in self._begun:
                self._notices.once(
                    "unsaved-note",
                    f"{what()}: no save of that step was due; label and measure steps that are saved",
                )
            else:
                self._notices.complain(error, f"{what()}: {error}")
        self._notices.tell()


SAVES = 10
"""Number of saves since a restore with an unchanged number, at which the notice comes."""


class FrozenNumbers:
    """The plain numbers at the top of a state that no run seems to set: `{"epoch": epoch}` keeps the value
    that `epoch` had when the dict was made.

    An unchanged number alone proves nothing: an epoch may be long, and a best loss stay the best.  So a
    first run gets no notice.  A restored run gets one if the step had the very number that the script
    begins with, as if the run before had never set it, and many later saves have it, too.
    """

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._resting: dict[str, float] = {}
        """Numbers whose restored value was the script's own, and which have not changed since."""
        self._saves = 0
        self._step = -1

    def went_on(self, handed: State, restored: State, *, found: bool) -> None:
        """Begin anew with a restore.  `handed`: the script's state before it; `restored`: after it."""
        self._saves = 0
        self._resting = {
            key: restored[key]
            for key, value in handed.items()
            if found and type(value) in (int, float) and restored.get(key) == value
        }

    def look(self, state: State, step: int) -> None:
        """Compare the numbers of a state that is saved, once per step."""
        if step == self._step or not self._resting:
            return
        self._step = step
        self._saves += 1
        resting = self._resting
        self._resting = {k: v for k, v in resting.items() if k in state and state[k] is v}
        for key, value in self._resting.items() if self._saves == SAVES else ():
            self._notices.once(
                "frozen-number",
                f"{key!r} of the state was {value} when the run before was saved, and in each of {SAVES} "
                "saves since: a number is saved as the dict has it, so if it is to count, set "
                f"ckpt.state[{key!r}] before each save",
                about=key,
            )
