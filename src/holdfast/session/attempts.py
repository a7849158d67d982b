"""Attempts: the tries of saves, of which a process may have several under way."""

from __future__ import annotations

import threading
from collections import deque
from functools import cache

import msgspec

from holdfast.base.errors import HoldfastError
from holdfast.core.checkpoint.lineage import Lineage, line_from
from holdfast.core.checkpoint.names import committed, step_numbers
from holdfast.core.checkpoint.tidying import discard
from holdfast.core.store import Store
from holdfast.session.once import begin_once


class SaveAttempt(msgspec.Struct, frozen=True, array_like=True):
    """One try of one save, as the coordinator gives it out."""

    step: int
    run: int
    name: str
    """Name of the folder that its files are in."""


class UnderWay:
    """The attempts of a process, of all its `Writer`s: DCP makes another of these for each `async_save`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[tuple[str, threading.Thread, SaveAttempt]] = []
        """On the coordinator: root, thread and attempt of each save that has not been committed."""
        self._taken: deque[str] = deque(maxlen=16)
        """Names of the attempts that this rank has written for last."""
        self._lines: dict[str, Lineage] = {}
        """The line of what this process trains, by root: the steps that it loaded, or has saved itself."""

    def begin(self, store: Store, wanted: int | None) -> SaveAttempt:
        """On the coordinator: begin an attempt of step `wanted`, or of one after all that there are, under
        way, too.  Deletes first what saves have left that failed on some rank, of which DCP tells nobody.
        """
        me = threading.current_thread()
        with self._lock:
            for one in [one for one in self._open if one[0] == store.url]:
                _, thread, failed = one
                if thread is me or not thread.is_alive():
                    self._open.remove(one)
                    discard(store, failed.step, failed.name)
            step = wanted
            if step is None:
                step = max([*step_numbers(store), *self._steps(store)], default=-1) + 1
            of_run = next((run for run, _ in self._lines.get(store.url, ())), None)
            attempt = SaveAttempt(step, *begin_once(store, step, goes_on=True, of_run=of_run))
            self._open.append((store.url, me, attempt))
            return attempt

    def line(self, url: str) -> Lineage:
        """Return the line of what the next save of a root is of."""
        with self._lock:
            return self._lines.get(url, ())

    def go_on(self, store: Store, run: int, step: int, line: Lineage) -> None:
        """Note that training goes on from a step, which was loaded, or committed."""
        self.take_over(store.url, line_from(run, step, line, committed(store)))

    def take_over(self, url: str, line: Lineage) -> None:
        """Take a line of a root, which another process of the training has found."""
        with self._lock:
            self._lines[url] = line

    def take(self, root: str, attempt: SaveAttempt) -> None:
        """Note that this rank writes for an attempt.  HoldfastError if it has written for that before: it
        was given to another save, too."""
        with self._lock:
            if attempt.name in self._taken:
                raise HoldfastError(
                    f"two saves of {root} are under way at once, and ranks cannot tell them apart",
                    step=attempt.step,
                    hint="give each a checkpoint_id of its own, or wait for the first",
                )
            self._taken.append(attempt.name)

    def end(self, store: Store, attempt: SaveAttempt) -> list[int]:
        """Go on from an attempt that was committed; the steps of the others of that root."""
        with self._lock:
            before = self._lines.get(store.url, ())
            newest = attempt.run, attempt.step
            self._lines[store.url] = newest, *(pair for pair in before if pair[0] != attempt.run)
            self._open = [one for one in self._open if one[2] != attempt]
            return self._steps(store)

    def _steps(self, store: Store) -> list[int]:
        return [attempt.step for root, _, attempt in self._open if root == store.url]


@cache
def under_way(pid: int) -> UnderWay:
    """The attempts of the process `pid`, which is this one: a fork has none of its parent's."""
    return UnderWay()
