"""Open files that several threads read, and somebody closes.

The number of a descriptor that is closed is given to the next file that is opened.  A thread that reads in
the middle of `close`, because storage has not answered it in time and nobody waited any longer, would read
from that one.  So whoever closes while the file is in use leaves it to the last user.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from holdfast.errors import UsageError


class Descriptor:
    """The file descriptor of an object that is read; closed when it is let go and not in use."""

    def __init__(self, fd: int, key: str) -> None:
        self._fd = fd
        self._key = key
        self._lock = threading.Lock()
        self._num_users = 1
        """Uses under way, and one more until `close` is called."""
        self._is_closed = False

    @contextmanager
    def used(self) -> Iterator[int]:
        """The descriptor, which stays open in this block.  UsageError if it is closed."""
        with self._lock:
            if self._is_closed:
                raise UsageError(f"the reader of '{self._key}' is closed", key=self._key)
            self._num_users += 1
        try:
            yield self._fd
        finally:
            self._let_go()

    def close(self) -> None:
        """Close it as soon as nobody uses it.  Safe to call twice."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            self._let_go()

    def _let_go(self) -> None:
        with self._lock:
            self._num_users -= 1
            is_last = not self._num_users
        if is_last:
            with suppress(OSError):
                os.close(self._fd)
