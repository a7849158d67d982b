"""The time that records hold up the training thread: in hooks around an optimizer's step, and after."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Spent:
    """Seconds that the training thread was held."""

    seconds: float
    """Altogether."""
    record_s: float | None
    """Seconds of these for a record, without plans and new memory; None if no record was made."""


class Clock:
    """Time of the training thread, since it was last asked for."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._once_s = 0.0
        self._made = False

    def take(self) -> Spent:
        """Return the time since it was last asked for, and begin anew."""
        spent = Spent(self._seconds, self._seconds - self._once_s if self._made else None)
        self._seconds = self._once_s = 0.0
        self._made = False
        return spent

    def made(self) -> None:
        """Note that a record is complete."""
        self._made = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """The training thread is held by this block."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - began

    @contextmanager
    def once(self) -> Iterator[None]:
        """Inside of `held`: this block is not done for every record."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._once_s += time.perf_counter() - began
