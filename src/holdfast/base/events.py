"""Events: what happened, when, how long it took, how many bytes.

Code says `with span("persist", step=7, bytes=n):` or `emit("save.skipped", step=7)`.  Users subscribe a
function to receive events; without subscribers an event costs almost nothing.  Counters always count.

    with holdfast.events.listen(print):
        holdfast.save("runs/x", {"model": model}, step=1)
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from holdfast.base.arguments import function_of
from holdfast.base.errors import HoldfastWarning, warn_user

Sink = Callable[["Event"], None]


@dataclass(frozen=True, slots=True)
class Event:
    """An event.  `duration_s` is None for a moment, a number for a span."""

    name: str
    time_s: float
    duration_s: float | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        took = "" if self.duration_s is None else f" {self.duration_s * 1e3:.1f} ms"
        return f"{self.name}{took} " + " ".join(f"{k}={v}" for k, v in self.fields.items())


_sinks: list[Sink] = []
"""Changed in single steps, without a lock: the collector ends subscriptions on whatever thread it runs."""
_counting = threading.RLock()
"""Held while a counter changes.  The collector may interrupt that with a finalizer that counts, too."""
counters: Counter[str] = Counter()
last_step = 0
"""The step passed to the last call of `Checkpointer.step`, for the launcher that watches this process."""


def subscribe(sink: Sink) -> Callable[[], None]:
    """Call `sink(event)` for every event from now on; returns a function that ends it."""
    function_of(sink, "subscribe", "sink", "that takes an Event", 1)
    _sinks.append(sink)

    def cancel() -> None:
        with suppress(ValueError):  # it was ended before
            _sinks.remove(sink)

    return cancel


@contextmanager
def listen(sink: Sink) -> Iterator[None]:
    """`subscribe` for the length of a with block."""
    function_of(sink, "listen", "sink", "that takes an Event", 1)
    cancel = subscribe(sink)
    try:
        yield
    finally:
        cancel()


def count(name: str, amount: int = 1) -> None:
    """Add to a counter; thread-safe."""
    with _counting:
        counters[name] += amount


def emit(name: str, **fields: Any) -> None:
    """Report a moment."""
    count(name)
    _deliver(Event(name, time.time(), None, fields))


@contextmanager
def span(name: str, **fields: Any) -> Iterator[dict[str, Any]]:
    """Report a phase with its duration; the yielded dict takes further fields."""
    started = time.perf_counter()
    try:
        yield fields
    except BaseException as error:
        fields["error"] = type(error).__name__
        raise
    finally:
        count(name)
        _deliver(Event(name, time.time(), time.perf_counter() - started, fields))


def _deliver(event: Event) -> None:
    for sink in tuple(_sinks):
        try:
            sink(event)
        except Exception as error:  # a failing subscriber must not break the save
            try:
                warn_user(f"event sink {sink!r} failed: {error!r}")
            except HoldfastWarning as warning:  # where warnings are errors
                traceback.print_exception(warning)


def _forget() -> None:
    """A forked child has none of its parent's threads, one of which may be counting."""
    global _counting
    _counting = threading.RLock()


os.register_at_fork(after_in_child=_forget)
