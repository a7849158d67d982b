"""Pauses Python's cyclic garbage collector while many long-lived objects are made.

A plan or a restore of n tensors makes tens of objects per tensor, none of them garbage.  The collector
cannot know that: it scans all objects of the process each time their number has grown by a quarter.  This
took half of the time of a first save of 100,000 tensors.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_holders = 0
_was_enabled = False


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the collector in this block, in all threads of the process.

    Only for work in memory that does not wait for anything.  Blocks of several threads may overlap: the
    collector resumes when the last of them ends, if it was enabled before the first.
    """
    global _holders, _was_enabled
    is_counted = False
    try:  # an interrupt may come at any point
        with _lock:
            if not _holders:
                _was_enabled = gc.isenabled()
            _holders, is_counted = _holders + 1, True
            gc.disable()
        yield
    finally:
        with _lock:
            _holders = max(_holders - is_counted, 0)  # a child that was forked inside has none
            if is_counted and not _holders and _was_enabled:
                gc.enable()


def _forget() -> None:
    """A forked child has none of its parent's threads, some of which may be in such a block."""
    global _lock, _holders
    _lock, held, _holders = threading.Lock(), _holders, 0
    if held and _was_enabled:
        gc.enable()


os.register_at_fork(after_in_child=_forget)
