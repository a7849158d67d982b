"""Graph captures: while a device captures a graph, no thread of this package touches a device.

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

CAPTURE_WAIT_S = 60.0
"""Longest wait for a capture, in seconds: a capture that has begun may never be ended."""

before_capture: list[Callable[[], None]] = []
"""Functions that a thread calls before it captures: each waits as a captured step would."""

_moves = threading.Condition()
_working: Counter[int] = Counter()
"""Pieces of work on devices that each thread is inside of."""
_owner: int | None = None
"""The thread whose captures any other thread would void."""
_captured: list[int] = []
"""Such captures, by the id of the graph: one may be inside of another."""
_has_captured = False


@contextmanager
def working() -> Iterator[None]:
    """A context of work on a device: it begins when no other thread captures a graph."""
    me = threading.get_ident()
    with _moves:
        if not _working[me]:
            _moves.wait_for(lambda: not is_barred(), CAPTURE_WAIT_S)
        _working[me] += 1
    try:
        yield
    finally:
        with _moves:
            _working[me] -= 1
            if not _working[me]:
                del _working[me]
                _moves.notify_all()


def is_barred() -> bool:
    """True while another thread captures a graph that the calling thread would void."""
    return _owner not in (None, threading.get_ident())


def is_capturing() -> bool:
    """True while the calling thread captures a graph: its device work is done at each replay, not now."""
    if _owner == threading.get_ident():
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def has_captured() -> bool:
    """True if this process has ever captured a graph: each replay writes to the graph's memory again, also
    where tensors are still held."""
    return _has_captured


def observe(kind: Any) -> None:
    """See when graphs of a class are captured, which has `capture_begin` and `capture_end`."""
    kind.capture_begin = _beginning(kind.capture_begin)
    kind.capture_end = _ending(kind.capture_end)


def _beginning(begin: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(begin)
    def capture_begin(
        graph: Any, pool: Any = None, capture_error_mode: str = "global", **more: Any
    ) -> Any:
        global _has_captured
        _has_captured = True
        given = {} if pool is None else {"pool": pool}
        if capture_error_mode != "global":  # no other thread voids it
            return begin(graph, capture_error_mode=capture_error_mode, **given, **more)
        for wait in before_capture:
            wait()
        try:
            _take_turn(graph)
            return begin(graph, **given, **more)
        except BaseException:
            _end_turn(graph)
            raise

    return capture_begin


def _ending(end: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(end)
    def capture_end(graph: Any) -> Any:
        try:
            return end(graph)
        finally:
            _end_turn(graph)

    return capture_end


def _take_turn(graph: Any) -> None:
    global _owner
    me, until = threading.get_ident(), time.monotonic() + CAPTURE_WAIT_S
    with _moves:
        _moves.wait_for(lambda: not is_barred(), until - time.monotonic())
        _owner = me
        _captured.append(id(graph))
        _moves.wait_for(lambda: set(_working) <= {me}, until - time.monotonic())


def _end_turn(graph: Any) -> None:
    global _owner
    with _moves:
        if id(graph) in _captured:
            _captured.remove(id(graph))
        if not _captured:
            _owner = None
            _moves.notify_all()


def _forget() -> None:
    """A forked child has none of its parent's threads."""
    global _moves, _owner
    _moves, _owner = threading.Condition(), None
    _working.clear()
    _captured.clear()


os.register_at_fork(after_in_child=_forget)
observe(torch.cuda.CUDAGraph)
if hasattr(torch.accelerator, "Graph"):  # since torch 2.13
    observe(torch.accelerator.Graph)
