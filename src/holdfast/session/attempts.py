"""Attempts to save planned steps; a process may have several under way."""

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
from holdfast.session.save_and_load import begin_once


class SaveAttempt(msgspec.Struct, frozen=True, array_like=True):
    """One try of one save, which the coordinator begins and hands to the other ranks."""

    step: int
    run: int
    name: str
    """Name of the folder that its files are in."""


class UnderWay:
    """The attempts of all `Writer`s of a process: DCP copies its `Writer` for each `async_save`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[tuple[str, threading.Thread, SaveAttempt]] = []
        """On the coordinator: root, thread and attempt of each save that has not been committed."""
        self._taken: deque[str] = deque(maxlen=16)
        """Names of the last attempts that this rank has written for."""
        self._lines: dict[str, Lineage] = {}
        """The lineage of the training, by root: the steps that this process has loaded or saved."""

    def begin(self, store: Store, wanted: int | None) -> SaveAttempt:
        """On the coordinator: begin an attempt of step `wanted`, or of the step after all that are saved or
        under way.  First deletes the files of failed saves, of which DCP does not tell the coordinator.
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
        """Return the lineage of the next save in a root."""
        with self._lock:
            return self._lines.get(url, ())

    def go_on(self, store: Store, run: int, step: int, line: Lineage) -> None:
        """Note that training goes on from a step that was loaded or committed."""
        self.take_over(store.url, line_from(run, step, line, committed(store)))

    def take_over(self, url: str, line: Lineage) -> None:
        """Take over the lineage of a root from another process of the training."""
        with self._lock:
            self._lines[url] = line

    def take(self, root: str, attempt: SaveAttempt) -> None:
        """Note that this rank writes for an attempt.  HoldfastError if it already has: then two saves share
        the attempt."""
        with self._lock:
            if attempt.name in self._taken:
                raise HoldfastError(
                    f"two saves of {root} are under way at once, and ranks cannot tell them apart",
                    step=attempt.step,
                    hint="give each a checkpoint_id of its own, or wait for the first",
                )
            self._taken.append(attempt.name)

    def end(self, store: Store, attempt: SaveAttempt) -> list[int]:
        """Go on from a committed attempt; return the steps of the root's other attempts under way."""
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
