"""Labels and metrics of steps that were not saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.base.errors import FormatError, NotFound, StoreError
from holdfast.base.notices import Notices


class NotesInVain:
    """Notes that could not be made: each is told as a failed save is, and ends no training."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._begun: set[int] = set()
        """Steps of which a durable save has begun."""
        self._first = self._last = -1
        """The first and the last step that the script has told of."""

    def at(self, step: int) -> None:
        """Note that the script was at a step."""
        self._first = step if self._first < 0 else min(step, self._first)
        self._last = max(step, self._last)

    def begun(self, step: int) -> None:
        """Note that a save of a step has begun."""
        self.at(step)
        self._begun.add(step)

    @contextmanager
    def told(self, what: Callable[[], str], step: int | None = None) -> Iterator[None]:
        """A block that notes something of a step.  `what()` does not hold then: a label, metrics.

        NotFound of a step that the script has never been at, which is a mistake.  Of one that was not due
        it is told once.
        """
        try:
            yield
        except (StoreError, FormatError) as error:
            is_known = step is None or self._first <= step <= self._last
            if isinstance(error, NotFound) and not is_known:
                raise
            if isinstance(error, NotFound) and step is not None and step not in self._begun:
                self._notices.once(
                    "unsaved-note",
                    f"{what()}: that step was not saved, for no save of it was due; note it of steps that "
                    "are",
                )
            else:
                self._notices.complain(error, f"{what()}: {error}")
        self._notices.tell()
