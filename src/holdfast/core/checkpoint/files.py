"""A step's files: byte ranges, verified by their digests before they are returned.

Readers stay open between reads, so that a file system reads ahead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from holdfast.base.errors import Corrupt, HoldfastError, NotFound, Unavailable
from holdfast.base.events import count
from holdfast.core.codec.digest import num_chunks
from holdfast.core.codec.table import DigestTable
from holdfast.core.format.manifest import FileEntry, Manifest
from holdfast.core.store import Reader, Store
from holdfast.core.store.contract import reads_of

MOST_OPEN = 64
"""Objects that are kept open, but for those in use."""


@dataclass
class _Open:
    reader: Reader
    num_users: int


class OpenReaders:
    """Open readers of a store's objects.  Thread-safe.

    Inside a `kept` block, readers in use and up to `MOST_OPEN` readers in all stay open.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}
        """Open readers by key, least recently used first."""
        self._num_keepers = 0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep objects open until the last `kept` block ends."""
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
            except (Unavailable, NotFound):  # the object may have been replaced (NFS: ESTALE)
                self._forget(key, found)
            finally:
                self._release(key, found)
        found = self._add(key, self._open_anew(key))
        try:
            found.reader.read(offset, into)
        finally:
            self._release(key, found)

    def have(self, key: str) -> None:
        """Open an object, which stays open inside a `kept` block."""
        found = self._find(key) or self._add(key, self._open_anew(key))
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
        """Add a reader; if another thread has added one for the key, this one is closed after its use."""
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
        """Close unused readers, least recently used first, until at most `most` are open."""
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


TABLES_BYTES = 32 << 20
"""Most bytes of cached digest tables: enough for 1 TB."""


class BlockMemory(Protocol):
    """Buffers that blocks of files are read into, before their bytes are copied to the targets."""

    def block(self, size: int) -> AbstractContextManager[memoryview]:
        """A context with at least `size` uninitialised bytes for the calling thread."""

    def finish(self) -> None:
        """Block until all copies are complete."""


class Files:
    """Verified ranges of a step's files.  Thread-safe; recently used digest tables are cached."""

    def __init__(self, store: Store, prefix: str, manifest: Manifest, *, verify: bool) -> None:
        self.store = store
        self.prefix = prefix
        self.manifest = manifest
        self.verify = verify
        self.readers = OpenReaders(store)
        self.store_reads = reads_of(store)
        self.block_memory: Callable[[], BlockMemory] | None = None
        """Makes the buffers for blocks whose targets are on devices; else None."""
        self._tables: dict[str, DigestTable] = {}
        """Tables by file path, least recently used first."""
        self._reading: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def key(self, file: FileEntry) -> str:
        return self.prefix + file.path

    def begin(self, file: FileEntry) -> None:
        """Open a file for reading.  NotFound; Corrupt if its length or digest table is wrong."""
        if self.verify:
            self.table(file)
        try:
            self.readers.have(self.key(file))
        except HoldfastError as error:
            error.step = self.manifest.step
            raise

    def table(self, file: FileEntry) -> DigestTable:
        """The digests of a file's chunks.  Corrupt if the table is damaged."""
        with self._lock:
            found = self._kept(file)
            reading = self._reading.setdefault(file.path, threading.Lock())
        if found is not None:
            return found
        with reading:
            with self._lock:
                found = self._kept(file)
            if found is None:
                found = self._read_table(file)
                with self._lock:
                    self._keep(file, found)
        return found

    def _kept(self, file: FileEntry) -> DigestTable | None:
        found = self._tables.pop(file.path, None)
        if found is not None:
            self._tables[file.path] = found
        return found

    def _keep(self, file: FileEntry, table: DigestTable) -> None:
        self._tables[file.path] = table
        while len(self._tables) > 1 and sum(t.nbytes for t in self._tables.values()) > TABLES_BYTES:
            del self._tables[next(iter(self._tables))]

    def _read_table(self, file: FileEntry) -> DigestTable:
        self.check_size(file)
        data = bytearray(file.bytes - file.table)
        self._read(file, file.table, memoryview(data))
        try:
            return DigestTable.of(data, file.digest, file.table, self.manifest.chunk_bytes)
        except Corrupt as error:
            self._say_where(error, file)
            raise

    def check_size(self, file: FileEntry) -> None:
        """Corrupt unless the file has the stated length; called before memory is allocated for it."""
        try:
            size = self.store.size(self.key(file))
        except HoldfastError as error:
            error.step = self.manifest.step
            raise
        if size != file.bytes:
            raise Corrupt(
                f"the file has {size} bytes, expected {file.bytes}",
                key=self.key(file),
                start=min(size, file.bytes),
                stop=max(size, file.bytes),
                expected=f"{file.bytes} bytes",
                found=f"{size} bytes",
                step=self.manifest.step,
            )

    def _read(self, file: FileEntry, offset: int, into: memoryview) -> None:
        try:
            self.readers.read(self.key(file), offset, into)
        except HoldfastError as error:
            error.step = self.manifest.step
            raise
        count("read.bytes", len(into))

    def span(self, file: FileEntry, first: int, stop: int) -> tuple[int, int]:
        """Byte range of chunks `first..stop`."""
        size = self.manifest.chunk_bytes
        return first * size, min(stop * size, file.table)

    def chunks(self, file: FileEntry, first: int, stop: int, into: memoryview) -> memoryview:
        """Read and verify chunks `first..stop` into the head of `into`; return that head."""
        a, b = self.span(file, first, stop)
        view = into[: b - a]
        self._read(file, a, view)
        self.check(file, first, view)
        return view

    def part(self, file: FileEntry, start: int, stop: int) -> memoryview:
        """Read and verify bytes `start..stop`, which lie before the table."""
        size = self.manifest.chunk_bytes
        first, end = start // size, num_chunks(stop, size)
        a, b = self.span(file, first, end)
        return self.chunks(file, first, end, memoryview(bytearray(b - a)))[start - a : stop - a]

    def check(self, file: FileEntry, first: int, view: memoryview) -> None:
        """Corrupt if a chunk of `view`, which begins with chunk `first`, differs from its digest."""
        if not self.verify:
            return
        table = self.table(file)
        try:
            table.check(first, view)
        except Corrupt as error:
            self._say_where(error, file)
            raise

    def _say_where(self, error: Corrupt, file: FileEntry) -> None:
        """Add the file and the step to an error."""
        error.key, error.step = self.key(file), self.manifest.step
