"""Readers that stay open from one read to the next: a file system then reads ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from holdfast.errors import HoldfastError, NotFound, Unavailable
from holdfast.store import Reader, Store

MOST_OPEN = 64


@dataclass
class _Open:
    reader: Reader
    num_users: int


class Readers:
    """The objects of a store that are being read.  Thread-safe.

    Inside a `kept` block up to `MOST_OPEN` of them, and those in use, stay open.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}
        """Open readers by key, in order of use: the one used last comes last."""
        self._num_keepers = 0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep objects open until this and every other such block has ended."""
        with self._lock:
            self._num_keepers += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_keepers -= 1
            self._close_idle(MOST_OPEN)

    def read(self, key: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on, as `Store.read`."""
        found = self._find(key)
        if found is not None:
            try:
                found.reader.read(offset, into)
                return
            except (Unavailable, NotFound):  # it may have been replaced (NFS: ESTALE)
                self._forget(key, found)
            finally:
                self._release(key, found)
        found = self._add(key, self._open_anew(key))
        try:
            found.reader.read(offset, into)
        finally:
            self._release(key, found)

    def _find(self, key: str) -> _Open | None:
        with self._lock:
            found = self._open.pop(key, None)
            if found is not None:
                found.num_users += 1
                self._open[key] = found
            return found

    def _open_anew(self, key: str) -> Reader:
        try:
            return self._store.open(key)
        except Unavailable:  # too many open files?
            self._close_idle(0)
            return self._store.open(key)

    def _add(self, key: str, reader: Reader) -> _Open:
        """Two threads may open one object at once: the first reader is kept, the other closed when
        it was used."""
        found = _Open(reader, 1)
        with self._lock:
            self._open.setdefault(key, found)
        return found

    def _forget(self, key: str, found: _Open) -> None:
        with self._lock:
            if self._open.get(key) is found:
                del self._open[key]

    def _release(self, key: str, found: _Open) -> None:
        with self._lock:
            found.num_users -= 1
            unknown = not found.num_users and self._open.get(key) is not found
        if unknown:
            _close(found.reader)
        self._close_idle(MOST_OPEN)

    def _close_idle(self, most: int) -> None:
        """Close those that nobody uses, the longest unused first, while more than `most` are open."""
        with self._lock:
            if not self._num_keepers:
                most = 0
            idle = [key for key, found in self._open.items() if not found.num_users]
            gone = [self._open.pop(key) for key in idle[: max(len(self._open) - most, 0)]]
        for found in gone:
            _close(found.reader)


def _close(reader: Reader) -> None:
    with suppress(HoldfastError, OSError):
        reader.close()
