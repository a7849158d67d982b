"""Labels and metrics of steps that were not saved, or that storage did not take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.base.errors import FormatError, NotFound, StoreError
from holdfast.base.notices import Notices


class NotesInVain:
    """Reports notes that could not be made, like failed saves, without ending the training."""

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
