"""Read-only stores that show objects of other stores under keys of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import closing, suppress
from typing import ClassVar

from holdfast.base.errors import NotFound, UsageError
from holdfast.core.store.contract import (
    SMALL_FILE_BYTES,
    WHOLE_BYTES,
    Bytes,
    Entry,
    Reader,
    Store,
    Writer,
    check_length,
    reads_of,
)


class ViewStore(ABC):
    """A read-only `Store`; a subclass defines how objects are opened."""

    url: str
    shows: ClassVar[str]
    """The view in words, for the error of a write: `a foreign checkpoint`."""

    @abstractmethod
    def open(self, key: str) -> Reader:
        """Open an object for reading, as `Store.open`."""

    @abstractmethod
    def size(self, key: str) -> int:
        """Length of an object in bytes, as `Store.size`."""

    def read(self, key: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on, as `Store.read`."""
        with closing(self.open(key)) as reader:
            reader.read(offset, into)

    def get(self, key: str) -> bytes:
        """Return all bytes of an object, as `Store.get`."""
        return self._whole(key, WHOLE_BYTES)

    def get_small(self, key: str) -> bytes:
        """Return all bytes of a small object, as `Bounded.get_small`."""
        return self._whole(key, SMALL_FILE_BYTES)

    def _whole(self, key: str, most_bytes: int) -> bytes:
        data = bytearray(check_length(key, self.url, self.size(key), most_bytes))
        self.read(key, 0, memoryview(data))
        return bytes(data)

    def entries(self, prefix: str = "") -> list[Entry]:
        """The objects of `list`, with their lengths."""
        return [Entry(key, self.size(key)) for key in self.list(prefix)]

    def list(self, prefix: str = "") -> list[str]:
        """Return no keys: readers of a view know them."""
        return []

    def put(
        self, key: str, data: Bytes, *, if_absent: bool = False, replacing: Bytes | None = None
    ) -> None:
        """Raise UsageError: a view is read-only."""
        raise self._refusal(key)

    def create(self, key: str, size: int) -> Writer:
        """Raise UsageError: a view is read-only."""
        raise self._refusal(key)

    def delete(self, key: str) -> None:
        """Raise UsageError: a view is read-only."""
        raise self._refusal(key)

    def _refusal(self, key: str) -> UsageError:
        return UsageError(f"{self.url} is {self.shows}: holdfast only reads it", key=key)


class JoinedStore(ViewStore):
    """The objects of two homes of a run: an object is read from the second if the first lacks it, or has it
    damaged."""

    shows = "two homes of a run"

    def __init__(self, first: Store, second: Store, missing: Iterable[str] = ()) -> None:
        """`missing`: keys known to be only in the second."""
        self.url = first.url
        self.read_bytes, self.read_threads = map(max, reads_of(first), reads_of(second))
        self.second = second
        self.first = first
        self.damaged: set[str] = set()
        """Keys of objects that are damaged in the first, so that the second is read."""
        self.missing = {*missing}
        """Keys that are only in the second, as far as known."""

    def _stores(self, key: str) -> list[Store]:
        return [self.second] if key in self.damaged else [self.first, self.second]

    def open(self, key: str) -> Reader:
        """Open an object for reading, as `Store.open`."""
        return JoinedReader(self._stores(key), key)

    def size(self, key: str) -> int:
        """Length of an object in bytes, as `Store.size`."""
        *before, last = self._stores(key)
        for store in before:
            with suppress(NotFound):
                return store.size(key)
        return last.size(key)

    def list(self, prefix: str = "") -> list[str]:
        """The keys of both, sorted."""
        first, second = set(self.first.list(prefix)), set(self.second.list(prefix))
        self.missing |= second - first
        return sorted(first | second)


class JoinedReader:
    """A reader of an object in the first store that has it; `NotFound` may come only at a read."""

    def __init__(self, stores: list[Store], key: str) -> None:
        self._left = stores
        self._key = key
        self._open_next()

    def _open_next(self) -> None:
        store = self._left.pop(0)
        try:
            self._reader = store.open(self._key)
        except NotFound:
            if not self._left:
                raise
            self._open_next()

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on, as `Reader.read`."""
        try:
            self._reader.read(offset, into)
        except NotFound:
            if not self._left:
                raise
            self._reader.close()
            self._open_next()
            self._reader.read(offset, into)

    def close(self) -> None:
        """Close the reader, as `Reader.close`."""
        self._reader.close()


class PartReader:
    """A reader of another reader's bytes from `start` on."""

    def __init__(self, inner: Reader, start: int) -> None:
        self._inner = inner
        self._start = start

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on, as `Reader.read`."""
        self._inner.read(self._start + offset, into)

    def close(self) -> None:
        """Close the other reader, as `Reader.close`."""
        self._inner.close()
