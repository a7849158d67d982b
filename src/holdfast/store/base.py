"""The interface that holdfast asks of storage: flat keys, immutable bytes.

A key is a relative path of `/`-separated names (`steps/0000000010/manifest.json`).  An object is
written once and never changed; it is either wholly there or not there at all.  Five questions make
a store, and each has one answer that object storage can give as well as a file system:

* *How does an object appear?*  `put` makes a small one appear at once, durable when the call
  returns; `if_absent=True` makes exactly one of several writers win (the others get `Exists`), and so
  does `replacing=` among several that have seen the same object and mean to replace it.
  `create` opens a large one: parts arrive in any order and from several threads, the object
  appears at `finish()`, durable, or never.
* *How is it read?*  By ranges, into the caller's memory.  A range past the end is an error, never
  a short read.  Who reads many ranges of one object opens it first: a file system then reads ahead.
* *What is there?*  `list(prefix)`: every key below, sorted.  A key whose `put` or `finish`
  returned before the call is listed.  (No `exists()`: two ranks may see two answers.)
* *How does it go?*  `delete`; deleting what is not there is fine.

No rename of directories, no locks, no append: NFS and object stores have none that can be trusted.
Errors are `StoreError`s: a store translates its own at its border.  Methods block and are
thread-safe.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias, runtime_checkable

Bytes: TypeAlias = "bytes | bytearray | memoryview"


@runtime_checkable
class Writer(Protocol):
    """One large object being written; owned by the caller until `finish` or `abort`."""

    block_bytes: int
    """Parts must start at a multiple of this, and be a multiple long but for the last.

    A power of two: 4096 for a disk, several MiB for object storage.  Whoever writes asks each writer.
    """

    def write(self, offset: int, data: Bytes) -> None:
        """Write a part.  Thread-safe; the memory is the caller's again when the call returns."""

    def finish(self) -> None:
        """Make the object appear with all its bytes, durable.  Raises if a part is missing."""

    def abort(self) -> None:
        """Forget everything written; safe after any error, also after `finish` raised."""


@runtime_checkable
class Reader(Protocol):
    """One object being read; owned by the caller, who must not close it under a `read`.

    After the object was deleted, a read gives its bytes, or `NotFound`, or `Unavailable`: never another
    object's.
    """

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on, as `Store.read`.  Thread-safe."""

    def close(self) -> None:
        """Let go of it.  Safe to call twice."""


@runtime_checkable
class Store(Protocol):
    """Flat keys to immutable bytes."""

    url: str
    """The store's address, for messages and for opening it again."""

    def put(
        self, key: str, data: Bytes, *, if_absent: bool = False, replacing: Bytes | None = None
    ) -> None:
        """Make a small object appear, replacing an older one unless `if_absent` (then `Exists`).

        `replacing`: the bytes of the object as the caller has seen it.  It is replaced only if these are
        its bytes now; else `Exists`, or `NotFound` if it is gone.  Of several calls that have seen the
        same object exactly one wins, whatever process or host they come from; calls without a condition,
        and `delete`, are not held off meanwhile.  Object storage does so with `If-Match`.  Not together
        with `if_absent`: UsageError.
        """

    def create(self, key: str, size: int) -> Writer:
        """Begin a large object of exactly `size` bytes under a fresh key."""

    def get(self, key: str) -> bytes:
        """The whole of a small object.  `NotFound` if there is none."""

    def read(self, key: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on.  `NotFound`; `Corrupt` if it ends before."""

    def open(self, key: str) -> Reader:
        """Open an object to read many ranges.  `NotFound` if there is none, now or at a read."""

    def size(self, key: str) -> int:
        """Length of an object in bytes.  `NotFound` if there is none."""

    def list(self, prefix: str = "") -> list[str]:
        """All keys that begin with `prefix`, sorted.  A missing prefix is an empty list."""

    def delete(self, key: str) -> None:
        """Remove an object if it is there; durable when the call returns."""
