"""Python's cyclic garbage collector, held back while many objects are made that will stay.

A plan or a restore of n tensors makes tens of objects for each of them, none of them garbage.  The
collector cannot know that: it goes over all objects of the process again each time a quarter more has
been made, which took half of the time of a first save of 100,000 tensors.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_holders = 0
_was_enabled = False


@contextmanager
def uncollected() -> Iterator[None]:
    """Hold the collector back in this block, in all threads of the process.

    For work in memory that ends by itself: nothing is waited for inside.  Blocks of several threads may
    overlap; the last one to end switches the collector on again, if it was on before the first.
    """
    global _holders, _was_enabled
    with _lock:
        if not _holders:
            _was_enabled = gc.isenabled()
            gc.disable()
        _holders += 1
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            if not _holders and _was_enabled:
                gc.enable()
