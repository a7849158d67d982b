"""Calls that another thread makes: in order, and whoever waits may give up."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import pytest

from holdfast.base.calls import CallThread, Promise, call_within, is_done, result_of


class Late(Exception):
    pass


def test_calls_are_made_in_order_and_their_errors_come_back() -> None:
    calls = CallThread("test")
    made: list[int] = []
    futures = [calls.submit(made.append, n) for n in range(9)]
    with pytest.raises(TimeoutError, match="of the call"):
        result_of(calls.submit(_raise, TimeoutError("of the call")), 60.0, Late)
    assert all(future.done() for future in futures) and made == list(range(9))


def _raise(error: Exception) -> None:
    raise error


def test_who_gives_up_goes_on_and_what_had_not_begun_is_dropped() -> None:
    calls, gate, made = CallThread("test"), threading.Event(), list[str]()
    begun = calls.submit(gate.wait)
    waiting = calls.submit(made.append, "dropped")
    with pytest.raises(Late):
        result_of(begun, 0.01, Late)
    assert not is_done(waiting, 0.0) and waiting.cancel() and is_done(waiting, 0.0)
    last = calls.submit(made.append, "made")
    gate.set()
    assert result_of(last, None, Late) is None and made == ["made"]


def test_a_single_call() -> None:
    gate = threading.Event()
    with pytest.raises(Late):
        call_within(gate.wait, 0.01, Late)
    gate.set()
    assert call_within(lambda: 7, 60.0, Late) == 7


def test_the_thread_ends_with_the_object_when_all_is_done() -> None:
    calls, gate = CallThread("test"), threading.Event()
    thread, future = calls.thread, calls.submit(gate.wait)
    del calls
    assert not future.done() and thread.is_alive()
    gate.set()
    thread.join(60.0)
    assert future.result() and not thread.is_alive()


def test_after_the_end_nothing_is_taken() -> None:
    calls = CallThread("test")
    calls.end()
    with pytest.raises(RuntimeError, match="takes no more calls"):
        calls.submit(int)


def test_what_a_call_was_given_is_let_go_before_its_result_is_there() -> None:
    class Given:
        pass

    calls = CallThread("test")
    for n in range(50):
        given = Given()
        seen, future = weakref.ref(given), calls.submit(lambda one, n: n, given, n)
        del given
        assert future.result(60.0) == n and seen() is None


def test_between_calls() -> None:
    looks: list[float] = []

    def look() -> float:
        looks.append(time.monotonic())
        return 0.001

    calls = CallThread("test", look, 0.001)
    while len(looks) < 3:
        time.sleep(0.001)
    assert result_of(calls.submit(lambda: len(looks)), 60.0, Late) >= 3
    calls.end()
    calls.thread.join(60.0)
    assert not calls.thread.is_alive()


@pytest.mark.parametrize("kind", [Promise, Future])
def test_a_promise_is_to_those_who_wait_what_a_future_is(kind: Callable[[], Any]) -> None:
    calls, gate = CallThread("test"), threading.Event()
    returns, raises, dropped = kind(), kind(), kind()
    calls.put(returns, gate.wait)
    calls.put(raises, _raise, KeyError("of the call"))
    calls.put(dropped, _raise, AssertionError("dropped"))
    assert dropped.cancel() and dropped.done() and not returns.done()
    for limit_s in (-1.0, 0.0, 0.01):
        assert not is_done(returns, limit_s)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(result_of, returns, None, Late) for _ in range(3)]
        gate.set()
        assert all(one.result(60.0) for one in waiting)
    assert returns.done() and not returns.cancel() and returns.result(0.0)
    with pytest.raises(KeyError, match="of the call"):
        result_of(raises, 60.0, Late)
    with pytest.raises(CancelledError):
        result_of(dropped, 60.0, Late)


def test_an_error_is_gone_with_whoever_caught_it() -> None:
    """Also where nobody collects garbage: its traceback does not hold what holds it."""
    promise: Promise[None] = Promise()
    promise.set_exception(Late())
    gc.disable()
    try:
        try:
            promise.result(60.0)
        except Late as error:
            seen = weakref.ref(error)
        del promise
        assert seen() is None
    finally:
        gc.enable()
