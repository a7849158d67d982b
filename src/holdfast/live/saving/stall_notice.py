"""The notice, given once, that a save has held training for long.

Training waits for a save in the call, and before the next optimizer step until all is copied (event
`window.wait`).  Both are short unless the save itself has to wait first: for memory that the previous save
still needs, or for the agent that gives memory.  Such a wait states its reason (`because`), which the
notice repeats if training had to wait, too.  A save that waits while training computes delays nothing.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.base.errors import notice_text
from holdfast.base.events import Event, subscribe

LONG_S = 1.0
"""Seconds that a save may hold training without a notice."""
MOST_KNOWN = 16
"""Number of saves whose kind and reason are kept: more are never under way."""


class HeldLong:
    """The `held-long` notice of a run, for saves and snapshots."""

    def __init__(self, news: list[str], clock: Callable[[], float] = time.perf_counter) -> None:
        """`news`: the list that gets the text."""
        self._news = news
        self._clock = clock
        self._saves: dict[int, str] = {}
        """Saves by step, in words."""
        self._reasons: dict[int, str] = {}
        self._was_told = False
        seer = weakref.ref(self)

        def see(event: Event) -> None:
            one = seer()
            if one is not None and event.name == "window.wait":
                one._see(event.fields.get("step", -1), event.duration_s or 0.0)

        weakref.finalize(self, subscribe(see))

    @contextmanager
    def by(self, kind: str, step: int) -> Iterator[None]:
        """A block with the call that begins a save of this `kind`, such as `snapshot`.  On the training
        thread."""
        self._saves[step] = f"the {kind} of step {step}"
        for known in (self._saves, self._reasons):
            while len(known) > MOST_KNOWN:
                del known[next(iter(known))]
        began = self._clock()
        yield
        self._see(step, self._clock() - began)

    @contextmanager
    def because(self, step: int, reason: str) -> Iterator[None]:
        """A block in which a save, and perhaps training, waits for `reason`.  On any thread."""
        began = self._clock()
        try:
            yield
        finally:
            if self._clock() - began > LONG_S / 2:
                self._reasons.setdefault(step, reason)

    def _see(self, step: int, held_s: float) -> None:
        save = self._saves.get(step)
        if save is None or self._was_told or held_s <= LONG_S:
            return
        self._was_told = True
        reason = self._reasons.get(step)
        told = notice_text(
            "held-long",
            f"training waited {held_s:.1f} s for {save}"
            + (f", which waited {reason}" if reason else "")
            + ': save less often, or leave such saves out with when_busy="skip"',
        )
        if told is not None:
            self._news.append(told)
