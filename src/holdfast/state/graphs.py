"""Graphs of a device: while one is captured, no thread of this package touches a device.

CUDA voids a capture if any thread of the process allocates on a device, page-locks memory or waits for an
event meanwhile (in its default mode), and the first steps, when scripts capture, are when saves rehearse.
So a capture begins once the copies under way are made, and ours wait until it has ended.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

LONGEST_S = 60.0
"""Nobody waits longer for the other: a capture that has begun may never be ended."""

before_capture: list[Callable[[], None]] = []
"""Called by the thread that is about to capture: wait for what a captured step would wait for."""

_moves = threading.Condition()
_working: Counter[int] = Counter()
"""Pieces of work on devices that each thread is inside of."""
_capturing: int | None = None
"""The thread that captures a graph."""


@contextmanager
def working() -> Iterator[None]:
    """A context of work on a device: it begins when no other thread captures a graph."""
    me = threading.get_ident()
    with _moves:
        if not _working[me]:
            _moves.wait_for(lambda: _capturing in (None, me), LONGEST_S)
        _working[me] += 1
    try:
        yield
    finally:
        with _moves:
            _working[me] -= 1
            if not _working[me]:
                del _working[me]
                _moves.notify_all()


def is_capturing() -> bool:
    """True while a graph is captured: what the training calls is done at each replay, and not now."""
    return _capturing is not None


def observe(graph: Any) -> None:
    """See when graphs are captured, of a class with `capture_begin` and `capture_end`."""
    graph.capture_begin = _beginning(graph.capture_begin)
    graph.capture_end = _ending(graph.capture_end)


def _beginning(begin: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(begin)
    def capture_begin(*args: Any, **kwargs: Any) -> Any:
        for wait in before_capture:
            wait()
        _take_turn()
        try:
            return begin(*args, **kwargs)
        except BaseException:
            _end_turn()
            raise

    return capture_begin


def _ending(end: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(end)
    def capture_end(*args: Any, **kwargs: Any) -> Any:
        try:
            return end(*args, **kwargs)
        finally:
            _end_turn()

    return capture_end


def _take_turn() -> None:
    global _capturing
    me, until = threading.get_ident(), time.monotonic() + LONGEST_S
    with _moves:
        _moves.wait_for(lambda: _capturing is None, until - time.monotonic())
        _capturing = me
        _moves.wait_for(lambda: set(_working) <= {me}, until - time.monotonic())


def _end_turn() -> None:
    global _capturing
    with _moves:
        _capturing = None
        _moves.notify_all()


def _forget() -> None:
    """A forked child has none of its parent's threads."""
    global _moves, _capturing
    _moves, _capturing = threading.Condition(), None
    _working.clear()


os.register_at_fork(after_in_child=_forget)
observe(torch.cuda.CUDAGraph)
