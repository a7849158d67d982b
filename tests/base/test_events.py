"""Events and the pause of the collector, where the collector or a fork comes in between."""

from __future__ import annotations

import gc
import os
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from holdfast.base import events, gc_pause

LIMIT_S = 60.0


class CollectingCounter(Counter[str]):
    """The collector runs before a counter begins, as it may whenever an object is made."""

    def __missing__(self, name: str) -> int:
        gc.collect()
        return 0


class Round:
    """Freed by the collector alone."""

    def __init__(self, end: Callable[[], object]) -> None:
        self.itself = self
        weakref.finalize(self, end)


def emitted(name: str) -> bool:
    """Whether a thread has come to the end of a report."""
    thread = threading.Thread(target=events.emit, args=(name,), daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return not thread.is_alive()


def test_a_subscription_ends_by_the_collector_while_an_event_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "counters", CollectingCounter())
    seen: list[str] = []

    def sink(event: events.Event) -> None:
        seen.append(event.name)

    cancel = events.subscribe(sink)
    Round(cancel)
    assert emitted("one")
    assert events.counters["one"] == 1
    assert not seen and sink not in events._sinks
    cancel()  # once more does nothing


def test_a_finalizer_counts_while_an_event_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "counters", CollectingCounter())
    Round(lambda: events.count("another"))
    assert emitted("one")
    assert events.counters == {"one": 1, "another": 1}


def test_a_sink_fails_where_warnings_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever reports goes on: a save has to end."""

    def sink(event: events.Event) -> None:
        raise ValueError("no room")

    with warnings.catch_warnings(), events.listen(sink):
        warnings.simplefilter("error")
        events.emit("one")
    assert "failed: ValueError('no room')" in capsys.readouterr().err


def child_does(work: Callable[[], bool]) -> bool:
    """Whether `work()` is true in a forked child, which ends with it."""
    pid = os.fork()
    if not pid:
        threading.Timer(LIMIT_S, os._exit, (3,)).start()
        os._exit(0 if work() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def inside(block: AbstractContextManager[Any]) -> Callable[[], None]:
    """Have a thread inside of a block until the function that is returned is called."""
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with block:
            entered.set()
            leave.wait()

    thread = threading.Thread(target=stay, daemon=True)
    thread.start()
    assert entered.wait(LIMIT_S)

    def end() -> None:
        leave.set()
        thread.join()

    return end


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_child_forked_while_a_thread_counts_can_count() -> None:
    end = inside(events._counting)
    try:
        assert child_does(lambda: not events.emit("one"))
    finally:
        end()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_child_forked_while_a_thread_pauses_the_collector_has_it() -> None:
    def has_it() -> bool:
        with gc_pause.uncollected():
            is_paused = not gc.isenabled()
        return is_paused and gc.isenabled()

    assert gc.isenabled()
    end = inside(gc_pause.uncollected())
    try:
        assert not gc.isenabled()
        assert child_does(lambda: gc.isenabled() and has_it())
    finally:
        end()
    assert gc.isenabled()
