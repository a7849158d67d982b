"""A store in the memory of this process, for tests and for trying things out.

    MemoryStore("a").put("x", b"1")
    MemoryStore("a").get("x")             # b"1": the name is shared within the process

It is as strict as a store on disk (keys, aligned parts), so what works here works there.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence

from holdfast.base.arguments import flag_of, unfit
from holdfast.base.errors import UsageError
from holdfast.core.store.contract import (
    BLOCK_BYTES,
    Bytes,
    Entry,
    EntryList,
    Parts,
    byte_view,
    check_key,
    check_prefix,
    check_range,
    exists,
    not_found,
    not_the_seen,
    seen_view,
    target_view,
)

_Objects = dict[str, "bytes | bytearray"]

_lock = threading.Lock()
_objects: defaultdict[str, _Objects] = defaultdict(dict)  # by the name of the store


class MemoryStore:
    """Objects in a dict, which all stores of one name share until the process ends."""

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise unfit("MemoryStore", "name", name, "a text")
        if not name:
            raise UsageError("a memory store needs a name", hint="memory://anything")
        self.name = name
        self.url = f"memory://{name}"
        with _lock:
            self._objects = _objects[name]

    def __repr__(self) -> str:
        return f"MemoryStore({self.name!r})"

    def put(
        self, key: str, data: Bytes, *, if_absent: bool = False, replacing: Bytes | None = None
    ) -> None:
        """Keep a copy of `data`, as `Store.put`."""
        check_key(key)
        flag_of(if_absent, "Store.put", "if_absent")
        seen = seen_view(key, if_absent, replacing)
        self.place(key, bytes(byte_view(data)), replace=not if_absent, seen=seen)

    def create(self, key: str, size: int) -> MemoryWriter:
        """Begin a large object."""
        return MemoryWriter(self, Parts(key, size))

    def get(self, key: str) -> bytes:
        """Return a copy of an object."""
        return bytes(self._object(key))

    def read(self, key: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on; `Corrupt` if the object is shorter."""
        self.open(key).read(offset, into)

    def open(self, key: str) -> MemoryReader:
        """Open an object for many reads."""
        return MemoryReader(key, self._object(key))

    def size(self, key: str) -> int:
        """Length of an object in bytes."""
        return len(self._object(key))

    def entries(self, prefix: str = "") -> list[Entry]:
        """All objects whose keys begin with `prefix`, sorted, with their lengths."""
        check_prefix(prefix)
        with _lock:
            sizes = [Entry(k, len(v)) for k, v in self._objects.items() if k.startswith(prefix)]
        return sorted(sizes)

    def list(self, prefix: str = "") -> list[str]:
        """All keys that begin with `prefix`, sorted."""
        check_prefix(prefix)
        with _lock:
            return sorted(key for key in self._objects if key.startswith(prefix))

    def delete(self, key: str) -> None:
        """Delete an object if it is there."""
        check_key(key)
        with _lock:
            self._objects.pop(key, None)

    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects, as `Bulk.delete_many`."""
        for key in keys:
            self.delete(key)

    def entries_many(self, prefixes: Sequence[str]) -> EntryList:
        """All objects whose keys begin with one of `prefixes`, as `Bulk.entries_many`."""
        return sorted({entry for prefix in prefixes for entry in self.entries(prefix)})

    def place(
        self,
        key: str,
        data: bytes | bytearray,
        *,
        replace: bool,
        seen: memoryview | None = None,
    ) -> None:
        """Make an object appear without a copy; the caller must not change `data` any more."""
        with _lock:
            if not replace and key in self._objects:
                raise exists(key, self.url)
            if seen is not None and key not in self._objects:
                raise not_found(key, self.url)
            if seen is not None and bytes(self._objects[key]) != bytes(seen):
                raise not_the_seen(key, self.url)
            self._objects[key] = data

    def _object(self, key: str) -> bytes | bytearray:
        check_key(key)
        with _lock:
            data = self._objects.get(key)
        if data is None:
            raise not_found(key, self.url)
        return data


class MemoryReader:
    """One object being read."""

    def __init__(self, key: str, data: bytes | bytearray) -> None:
        self._key = key
        self._data: bytes | bytearray | None = data

    def read(self, offset: int, into: memoryview) -> None:
        """Copy a range; `Corrupt` if the object is shorter."""
        if self._data is None:
            raise UsageError(f"the reader of '{self._key}' is closed", key=self._key)
        data, view = self._data, target_view(into, offset)
        check_range(self._key, offset, view, len(data))
        view[:] = memoryview(data)[offset : offset + len(view)]

    def close(self) -> None:
        """Release the memory."""
        self._data = None


class MemoryWriter:
    """One large object being written."""

    block_bytes = BLOCK_BYTES

    def __init__(self, store: MemoryStore, parts: Parts) -> None:
        self._store = store
        self._parts = parts
        self._data: bytearray | None = bytearray(parts.size)

    def write(self, offset: int, data: Bytes) -> None:
        """Copy a part."""
        view = byte_view(data)
        self._parts.check(offset, len(view))
        memoryview(self._open())[offset : offset + len(view)] = view
        self._parts.add(offset, len(view))

    def finish(self) -> None:
        """Make the object appear; `Exists` if the key is taken."""
        data = self._open()
        self._parts.check_complete()
        self._store.place(self._parts.key, data, replace=False)
        self._data = None

    def abort(self) -> None:
        """Discard everything written."""
        self._data = None

    def _open(self) -> bytearray:
        if self._data is None:
            key = self._parts.key
            raise UsageError(f"the writer of '{key}' is finished or aborted", key=key)
        return self._data
