"""Whose turn it is, the captures' of graphs or that of our work on devices (`state.graphs`)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.live.state import graphs


class Graph:
    """A graph whose capture does nothing."""

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.mode = capture_error_mode

    def capture_end(self) -> None:
        pass


graphs.observe(Graph)


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(graphs, "CAPTURE_WAIT_S", 120.0)
    monkeypatch.setattr(graphs, "_has_captured", False)
    yield
    assert graphs._owner is None and not graphs._captured and not graphs._working


def working(entered: threading.Event) -> threading.Thread:
    """A thread that has some work on a device."""

    def work() -> None:
        with graphs.working():
            entered.set()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_work_waits_for_the_last_of_nested_captures() -> None:
    outer, inner, entered = Graph(), Graph(), threading.Event()
    outer.capture_begin()
    inner.capture_begin()
    thread = working(entered)
    inner.capture_end()
    assert graphs.is_capturing() and not entered.wait(0.2)
    with graphs.working():  # the thread that captures is not barred
        outer.capture_end()
    assert entered.wait(120) and not graphs.is_capturing()
    thread.join()


def test_a_capture_begins_when_work_is_over() -> None:
    inside, leave, captured = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        with graphs.working(), graphs.working():
            inside.set()
            leave.wait(120)

    def capture() -> None:
        graph = Graph()
        graph.capture_begin()
        captured.set()
        graph.capture_end()

    threads = [threading.Thread(target=work), threading.Thread(target=capture)]
    threads[0].start()
    assert inside.wait(120)
    threads[1].start()
    assert not captured.wait(0.2)
    leave.set()
    assert captured.wait(120)
    for thread in threads:
        thread.join()


def test_a_capture_that_no_other_thread_voids_bars_none() -> None:
    graph, entered = Graph(), threading.Event()
    graph.capture_begin(capture_error_mode="thread_local")
    assert graph.mode == "thread_local"
    thread = working(entered)
    assert entered.wait(120)
    thread.join()
    graph.capture_end()


@pytest.mark.parametrize("when", ["before", "in its turn", "as it begins"])
def test_a_capture_that_is_interrupted_is_over(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    graph = Graph()
    if when == "before":
        monkeypatch.setattr(graphs, "before_capture", [interrupted])
    elif when == "in its turn":
        take = graphs._take_turn
        monkeypatch.setattr(graphs, "_take_turn", lambda one: (take(one), interrupted()))
    else:
        kind = type("Fails", (Graph,), {"capture_begin": interrupted})
        graphs.observe(kind)
        graph = kind()
    with pytest.raises(KeyboardInterrupt):
        graph.capture_begin()
    assert graphs.has_captured() and not graphs.is_capturing()
    entered = threading.Event()
    working(entered).join()
    assert entered.is_set()
