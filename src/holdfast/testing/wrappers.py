"""Wrappers around a store: `StopAfter` dies, `Faulty` fails, `Slow` waits, `Counting` counts.

    store = StopAfter(MemoryStore("a"), 3)
    with suppress(Stopped):
        save(store)                        # dies at its third change
    verify(store.inner)                    # the store that a restarted job finds

Each wrapper is a complete `Store`, so they nest.  A wrapper overrides one function, `around`, which runs
around every call of the inner store.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar, final

from holdfast.base.arguments import count_of, flag_of, function_of, instance_of, seconds_of
from holdfast.core.store import delete_many
from holdfast.core.store.contract import Bulk, Bytes, Entry, EntryList, Reader, Store, Writer

T = TypeVar("T")

_CHANGES: Final = frozenset({"put", "create", "write", "finish", "delete", "delete_many"})
"""The operations that change what a store holds."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a store or writer: `name` is the method, `num_bytes` the bytes to move."""

    name: str
    key: str
    num_bytes: int = 0


class Wrapper(ABC):
    """A store whose calls, and those of its readers and writers, all go through `around`.

    The only exception is a reader's `close`, which must always work.
    """

    def __init__(self, inner: Store) -> None:
        call = type(self).__name__
        self.inner = instance_of(inner, Store, call, "inner", "a Store")  # type: ignore[type-abstract]
        self.url = inner.url

    @abstractmethod
    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Return `call()`; an override may skip it, or act before and after it."""

    @final
    def put(
        self, key: str, data: Bytes, *, if_absent: bool = False, replacing: Bytes | None = None
    ) -> None:
        """`Store.put`."""
        self.around(
            Operation("put", key, memoryview(data).nbytes),
            lambda: self.inner.put(key, data, if_absent=if_absent, replacing=replacing),
        )

    @final
    def create(self, key: str, size: int) -> Writer:
        """`Store.create`."""
        writer = self.around(Operation("create", key), lambda: self.inner.create(key, size))
        return WrappedWriter(self, key, writer)

    @final
    def get(self, key: str) -> bytes:
        """`Store.get`."""
        return self.around(Operation("get", key), lambda: self.inner.get(key))

    @final
    def read(self, key: str, offset: int, into: memoryview) -> None:
        """`Store.read`."""
        operation = Operation("read", key, into.nbytes)
        self.around(operation, lambda: self.inner.read(key, offset, into))

    @final
    def open(self, key: str) -> Reader:
        """`Store.open`."""
        reader = self.around(Operation("open", key), lambda: self.inner.open(key))
        return WrappedReader(self, key, reader)

    @final
    def size(self, key: str) -> int:
        """`Store.size`."""
        return self.around(Operation("size", key), lambda: self.inner.size(key))

    @final
    def entries(self, prefix: str = "") -> list[Entry]:
        """`Store.entries`."""
        return self.around(Operation("entries", prefix), lambda: self.inner.entries(prefix))

    @final
    def list(self, prefix: str = "") -> list[str]:
        """`Store.list`."""
        return self.around(Operation("list", prefix), lambda: self.inner.list(prefix))

    @final
    def delete(self, key: str) -> None:
        """`Store.delete`."""
        self.around(Operation("delete", key), lambda: self.inner.delete(key))

    def delete_many(self, keys: Sequence[str]) -> None:
        """`Bulk.delete_many`: counts as one call, even if the inner store deletes one by one."""
        operation = Operation("delete_many", keys[0] if keys else "")
        self.around(operation, lambda: delete_many(self.inner, keys))

    @final
    def entries_many(self, prefixes: Sequence[str]) -> EntryList:
        """`Bulk.entries_many`: counts as one call, even if the inner store lists prefix by prefix."""
        return self.around(
            Operation("entries_many", " ".join(prefixes)), lambda: self._look(prefixes)
        )

    def _look(self, prefixes: Sequence[str]) -> EntryList:
        if isinstance(self.inner, Bulk):
            return self.inner.entries_many(prefixes)
        return sorted({entry for prefix in prefixes for entry in self.inner.entries(prefix)})


@final
class WrappedReader:
    """The reader of a `Wrapper`."""

    def __init__(self, store: Wrapper, key: str, inner: Reader) -> None:
        self._store = store
        self._key = key
        self._inner = inner

    def read(self, offset: int, into: memoryview) -> None:
        """`Reader.read`."""
        operation = Operation("read", self._key, into.nbytes)
        self._store.around(operation, lambda: self._inner.read(offset, into))

    def close(self) -> None:
        """`Reader.close`."""
        self._inner.close()


@final
class WrappedWriter:
    """The writer of a `Wrapper`."""

    def __init__(self, store: Wrapper, key: str, inner: Writer) -> None:
        self.block_bytes = inner.block_bytes
        self._store = store
        self._key = key
        self._inner = inner

    def write(self, offset: int, data: Bytes) -> None:
        """`Writer.write`."""
        operation = Operation("write", self._key, memoryview(data).nbytes)
        self._store.around(operation, lambda: self._inner.write(offset, data))

    def finish(self) -> None:
        """`Writer.finish`."""
        self._store.around(Operation("finish", self._key), self._inner.finish)

    def abort(self) -> None:
        """`Writer.abort`."""
        self._store.around(Operation("abort", self._key), self._inner.abort)


class Stopped(BaseException):
    """The process counts as dead from here on; not an `Exception`, so that no handler catches it."""


@final
class StopAfter(Wrapper):
    """Dies at its `n`-th change (put, create, write, finish, delete; counted from 1).  In `delete_many`
    each object is a change: a process may die when some of them are deleted.

    The `n`-th change does not take effect, unless `torn`: then the process died between the effect and the
    return.  Afterwards every call raises `Stopped` without effect, even `abort`, since a dead process
    cleans up nothing.  `n=None` never dies, and so counts a whole run:

        whole = StopAfter(MemoryStore("whole"), None)
        save(whole)
        for n in range(1, len(whole.operations) + 1): ...
    """

    def __init__(self, inner: Store, n: int | None, *, torn: bool = False) -> None:
        super().__init__(inner)
        self.n = None if n is None else count_of(n, "StopAfter", "n", least=0)
        self.torn = flag_of(torn, "StopAfter", "torn")
        self.operations: list[Operation] = []
        """The changes that took effect, in order."""
        self._num_changes = 0
        self._stopped = False
        self._lock = threading.Lock()

    @final
    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete the objects one by one, while alive."""
        for key in keys:
            self.delete(key)

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Let the call through while alive."""
        last = self._is_last(operation)
        if last and not self.torn:
            raise Stopped(f"before {operation}")
        result = call()
        if operation.name in _CHANGES:
            with self._lock:
                self.operations.append(operation)
        if last:
            raise Stopped(f"after {operation}")
        return result

    def _is_last(self, operation: Operation) -> bool:
        with self._lock:
            if self._stopped:
                raise Stopped(f"before {operation}")
            self._num_changes += operation.name in _CHANGES
            self._stopped = self._num_changes == self.n
            return self._stopped


@final
class Faulty(Wrapper):
    """Raises the error that `fail(op, key)` returns instead of doing the call; None lets the call pass.

    `op` is the name of the method.  `fail` is called from the threads that use the store.
    """

    def __init__(self, inner: Store, fail: Callable[[str, str], Exception | None]) -> None:
        super().__init__(inner)
        self.fail = function_of(fail, "Faulty", "fail", "that takes an operation and a key", 2)

    @final
    def delete_many(self, keys: Sequence[str]) -> None:
        """Ask `fail` for each object, as for `delete`: some deletions may fail and others succeed."""
        for key in keys:
            self.delete(key)

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Ask `fail` first."""
        error = self.fail(operation.name, operation.key)
        if error is not None:
            raise error
        return call()


@final
class Slow(Wrapper):
    """Waits `seconds` before every call, like a distant or busy store."""

    def __init__(self, inner: Store, seconds: float) -> None:
        super().__init__(inner)
        self.seconds = seconds_of(seconds, "Slow", "seconds", or_zero=True)

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Wait first."""
        time.sleep(self.seconds)
        return call()


@final
class Counting(Wrapper):
    """Counts the calls of each operation, and the bytes of successful calls."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()
        self.bytes_read = 0
        self.bytes_written = 0
        self._lock = threading.Lock()

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Count before and after."""
        with self._lock:
            self.calls[operation.name] += 1
        result = call()
        with self._lock:
            if operation.name in ("put", "write"):
                self.bytes_written += operation.num_bytes
            else:
                self.bytes_read += len(result) if isinstance(result, bytes) else operation.num_bytes
        return result
