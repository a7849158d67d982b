"""The time for which records hold the training thread: in an optimizer's hooks, and after its step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Spent:
    """Seconds for which the training thread was held."""

    seconds: float
    """The total."""
    record_s: float | None
    """The part for a record, without planning and new memory; None if no record was made."""


class Clock:
    """Adds up the time for which the training thread is held."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._occasional_s = 0.0
        self._has_record = False

    def take(self) -> Spent:
        """Return the time since the last call, and count from zero again."""
        record_s = self._seconds - self._occasional_s if self._has_record else None
        spent = Spent(self._seconds, record_s)
        self._seconds = self._occasional_s = 0.0
        self._has_record = False
        return spent

    def note_record(self) -> None:
        """Note that a record is complete."""
        self._has_record = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Count the time of this block."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - began

    @contextmanager
    def occasional(self) -> Iterator[None]:
        """Within `held`: leave this block out of `record_s`, as it is not done for every record."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._occasional_s += time.perf_counter() - began
