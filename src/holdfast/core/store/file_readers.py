"""Files that several threads read: through the page cache, or past it.

The number of a closed descriptor is given to the next file that is opened.  A read that storage has not
answered in time may still be under way at `close`, and would then read from that other file.  So the last
user closes the file.

Bytes that are read once go past the page cache.  Filling the cache costs the kernel a copy and fresh
pages, on the cores of a restart, and evicts data that training reads again.
"""

from __future__ import annotations

import fcntl
import io
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from holdfast.base.errors import UsageError
from holdfast.base.storage_deadlines import Patience, patient
from holdfast.core.store.contract import BLOCK_BYTES, check_range, past_end, target_view
from holdfast.core.store.oserrors import REFUSED, translated
from holdfast.core.store.regular import O_DIRECT, open_regular
from holdfast.core.store.tempfiles import is_aligned


class Descriptor:
    """The open file of an object being read; the last user closes it after `close`."""

    def __init__(self, file: io.FileIO, key: str) -> None:
        self._file = file
        self._key = key
        self._lock = threading.Lock()
        self._num_users = 1
        """Number of uses under way, plus one until `close`."""
        self._is_closed = False

    @contextmanager
    def used(self) -> Iterator[int]:
        """Yield the descriptor, which stays open in this block.  UsageError if it is closed."""
        with self._lock:
            if self._is_closed:
                raise UsageError(f"the reader of '{self._key}' is closed", key=self._key)
            self._num_users += 1
        try:
            yield self._file.fileno()
        finally:
            self._let_go()

    def close(self) -> None:
        """Close the file once no use is under way.  Safe to call twice."""
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
                self._file.close()


_SPARE_BYTES = 2 << 20


class _Spare(threading.local):
    """A page-aligned buffer per thread."""

    def __init__(self) -> None:
        self.view = memoryview(mmap.mmap(-1, _SPARE_BYTES, flags=mmap.MAP_PRIVATE))


_spare = _Spare()


class LocalReader:
    """One object being read; with `direct` past the page cache, unless the file system refuses O_DIRECT.

    Through the cache, the kernel reads ahead of sequential reads by one descriptor.  Past it, whole blocks
    are read directly into aligned memory, all else through a buffer of the reading thread.
    """

    def __init__(self, key: str, path: str, patience: Patience, *, direct: bool = False) -> None:
        self.patience = patience
        self._key = key
        self._path = path
        file, self._direct, self._size = open_regular(path, key, direct=direct)
        self._file = Descriptor(file, key)

    def place_of(self, key: str = "") -> str:
        """The path."""
        return self._path

    @patient
    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on; `Corrupt` if the object is shorter."""
        view, at = target_view(into, offset), offset
        with self._file.used() as fd, translated("read", self._key, self._path):
            check_range(self._key, offset, view, self._size)
            while view:
                got = self._piece(fd, at, view)
                if not got:
                    break
                view, at = view[got:], at + got
            size = os.fstat(fd).st_size if view else 0
        if view:
            raise past_end(self._key, offset, at + len(view), size)

    def _piece(self, fd: int, at: int, view: memoryview) -> int:
        """Read some bytes from `at` on into the head of `view`; return how many, 0 at the end."""
        if not self._direct:
            return os.preadv(fd, [view], at)
        if at % BLOCK_BYTES == 0 and len(view) >= BLOCK_BYTES and is_aligned(view):
            return self._blocks(fd, at, view[: len(view) // BLOCK_BYTES * BLOCK_BYTES])
        before = at % BLOCK_BYTES
        stop = min(_SPARE_BYTES, -(-(before + len(view)) // BLOCK_BYTES) * BLOCK_BYTES)
        got = min(self._blocks(fd, at - before, _spare.view[:stop]) - before, len(view))
        if got <= 0:
            return 0
        view[:got] = _spare.view[before : before + got]
        return got

    def _blocks(self, fd: int, at: int, into: memoryview) -> int:
        direct = self._direct  # a copy: several threads may be refused at once
        try:
            return os.preadv(fd, [into], at)
        except OSError as error:
            if not direct or error.errno not in REFUSED:
                raise
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~O_DIRECT)
        self._direct = False
        return os.preadv(fd, [into], at)

    def close(self) -> None:
        """Close the file once no read is under way."""
        self._file.close()
