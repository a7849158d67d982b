"""Signs of life of a worker: its commits, and movement without a step.

A worker moves if its main thread is at another place in its code than at the last check, if holdfast has
read or written, or if its child processes compute: a script may wait for an evaluation in a child process.
The worker's own processor time proves nothing, since a wait in a collective may spin.  Nor do children that
only poll for work, such as idle DataLoader workers: they use less than `BUSY` of a core.
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
from holdfast.base.host import stat_fields

BUSY = 0.05
"""Share of a core from which on the child processes of a worker count as computing."""
_BUSY_LIMIT_S = 7200.0
"""Seconds for which computing children count while the worker itself is still: a monitor may run for
ever."""
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Commits:
    """Counts commits, in memory or in storage, of steps newer than all before."""

    number: int = 0
    _saved: int = 0
    """The newest committed step since training last went back."""
    _at: tuple[int, int] = (0, 0)

    def at(self, attempt: int, step: int) -> None:
        """Note the attempt and step of training.  In a new attempt, or after going back, older steps count
        again."""
        if attempt != self._at[0] or step < self._at[1]:
            self._saved = 0
        self._at = attempt, step

    def note(self, step: int) -> None:
        """Note that a step is committed; a step no newer than the last commit, such as a snapshot's, is
        ignored."""
        if step > self._saved:
            self._saved, self.number = step, self.number + 1


class Movement:
    """The movement of this process between two checks."""

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
        return self._have_computed() and time.monotonic() - self._moved_at < _BUSY_LIMIT_S

    def _have_computed(self) -> bool:
        """Tell whether the child processes have computed since the last call."""
        before, since = self._used_s, self._looked_at
        self._used_s, self._looked_at = used_below_s(), time.monotonic()
        return self._used_s - before >= BUSY * (self._looked_at - since)


def _place() -> int:
    """Return a number that changes when the main thread moves in its code, or holdfast reads or writes."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    places: list[object] = [sum(tuple(events.counters.values()))]
    while frame is not None:
        places += [id(frame.f_code), frame.f_lasti]
        frame = frame.f_back
    return hash(tuple(places))


def used_below_s() -> float:
    """Return the processor time, in seconds, of all descendants of this process: running ones, and those
    that ended and were waited for."""
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
    """Yield the pids of the children of a process."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                text = Path(f"/proc/{pid}/task/{thread}/children").read_text()
                yield from map(int, text.split())


def _used_s(pid: int) -> float:
    """Return the processor time of a process and its reaped children; 0 if the process is gone."""
    return sum(map(int, stat_fields(pid)[11:15])) / _TICKS
