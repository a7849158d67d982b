"""Telling, once, that a save has held the training up for long.

Training waits for a save at two places: in the call, and before the next optimizer step, until all is
copied (event `window.wait`).  Both are short, unless the save itself has to wait first: for the memory that
the one before still needs, or for the agent that gives memory.  Whoever waits there says so (`because`),
and is named if the training had to wait with it.  A save that waits while the training computes holds up
nobody.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.base.errors import notice_text
from holdfast.base.events import Event, subscribe

LONG_S = 1.0
"""Seconds that a save may hold up training; what is longer is told."""
MOST_KNOWN = 16
"""Saves of which the kind and the reason are kept: more are not under way."""


class HeldLong:
    """The notice of a run whose training was held by a save, in memory or durable."""

    def __init__(self, news: list[str], clock: Callable[[], float] = time.perf_counter) -> None:
        """`news`: takes the text."""
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
        """The call that begins a save, of a `kind` such as `snapshot`.  On the training thread."""
        self._saves[step] = f"the {kind} of step {step}"
        for known in (self._saves, self._reasons):
            while len(known) > MOST_KNOWN:
                del known[next(iter(known))]
        began = self._clock()
        yield
        self._see(step, self._clock() - began)

    @contextmanager
    def because(self, step: int, reason: str) -> Iterator[None]:
        """A block in which a save waits, and training perhaps with it.  On any thread."""
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
