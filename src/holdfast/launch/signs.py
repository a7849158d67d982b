"""Signs of life of a worker: saves that are complete, and whether it moves though it does no step.

A worker moves if its main thread is elsewhere in its code than at the last look, if work of holdfast has
gone on, or if processes below it compute: a script may wait for an evaluation that it has begun as a
process.  Its own processor time says nothing, for who waits in a collective may spin; nor do processes that
only look now and then whether there is something to do, as idle workers of a DataLoader: these take less
than `BUSY` of a core.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.base import events

BUSY = 0.05
"""Share of a core from which on the processes below a worker compute."""
LONGEST_S = 7200.0
"""Seconds for which that counts while the worker itself is still: a monitor may compute for ever."""
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Commits:
    """The saves, in memory or in storage, that have brought a run further."""

    number: int = 0
    _saved: int = 0
    """The newest step that is complete, since training has gone back last."""
    _at: tuple[int, int] = (0, 0)

    def at(self, attempt: int, step: int) -> None:
        """Note where training is.  In a new attempt, or where it has gone back, older steps count anew."""
        if attempt != self._at[0] or step < self._at[1]:
            self._saved = 0
        self._at = attempt, step

    def note(self, step: int) -> None:
        """Note that a step is complete: nothing, if a newer one was before, as a snapshot is."""
        if step > self._saved:
            self._saved, self.number = step, self.number + 1


class Movement:
    """The movement of this process, from one look to the next."""

    def __init__(self) -> None:
        self._place = 0
        self._moved_at = time.monotonic()
        self._looked_at = time.monotonic()
        self._used_s = 0.0

    def is_seen(self) -> bool:
        """Tell whether this process has moved since the last call."""
        before, self._place = self._place, _place()
        if self._place != before:
            self._moved_at = time.monotonic()
            return True
        return self._have_computed() and time.monotonic() - self._moved_at < LONGEST_S

    def _have_computed(self) -> bool:
        """Tell whether the processes below this one have computed since the last call."""
        before, since = self._used_s, self._looked_at
        self._used_s, self._looked_at = used_below_s(), time.monotonic()
        return self._used_s - before >= BUSY * (self._looked_at - since)


def _place() -> int:
    """Return a number that is another one when the main thread is elsewhere in its code, or work of
    holdfast, such as reading and writing, has gone on."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    places: list[object] = [sum(tuple(events.counters.values()))]
    while frame is not None:
        places += [id(frame.f_code), frame.f_lasti]
        frame = frame.f_back
    return hash(tuple(places))


def used_below_s() -> float:
    """Return the processor time, in seconds, of all processes below this one: of those that run, and of
    those that have ended and were waited for."""
    ended = os.times()
    used_s = ended.children_user + ended.children_system
    parents, seen = [os.getpid()], set[int]()
    while parents:
        for pid in _children(parents.pop()):
            if pid not in seen:
                seen.add(pid)
                parents.append(pid)
                used_s += _used_s(pid)
    return used_s


def _children(pid: int) -> Iterator[int]:
    """Yield the processes that the threads of a process have begun."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                text = Path(f"/proc/{pid}/task/{thread}/children").read_text()
                yield from map(int, text.split())


def _used_s(pid: int) -> float:
    """Return the processor time of a process and of those that it has waited for; 0 if it is gone."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return sum(map(int, fields[11:15])) / _TICKS
    return 0.0
