"""A step's files: byte ranges that are verified by their digests before anybody sees them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from holdfast.codec.digest import Digests, first_difference, hexdigest, num_chunks
from holdfast.errors import Corrupt, HoldfastError
from holdfast.events import count
from holdfast.format.manifest import FileEntry, Manifest
from holdfast.store import Reader, Store

TABLES_BYTES = 32 << 20
"""Of digest tables to keep: those of a terabyte."""


MOST_OPEN = 64
"""Files that one process keeps open between reads."""


@dataclass
class _Open:
    reader: Reader
    num_users: int


class OpenFiles:
    """Readers of a store's objects.  Inside `kept` they stay open from read to read.  Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}
        """The last used last."""
        self._num_keepers = 0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep files open until this and every other such block has ended."""
        with self._lock:
            self._num_keepers += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_keepers -= 1
                self._trim()

    @contextmanager
    def reader(self, key: str) -> Iterator[Reader]:
        """A reader that nobody closes under this block."""
        found = self._take(key, None) or self._take(key, self._store.open(key))
        assert found is not None
        try:
            yield found.reader
        finally:
            with self._lock:
                found.num_users -= 1
                self._trim()

    def _take(self, key: str, opened: Reader | None) -> _Open | None:
        """The reader there is, else the one just opened."""
        with self._lock:
            found = self._open.pop(key, None)
            if found is None and opened is not None:
                found = _Open(opened, 0)
            elif opened is not None:
                opened.close()  # another thread was faster
            if found is not None:
                found.num_users += 1
                self._open[key] = found
            return found

    def _trim(self) -> None:
        most = MOST_OPEN if self._num_keepers else 0
        idle = [key for key, found in self._open.items() if not found.num_users]
        for key in idle[: max(len(self._open) - most, 0)]:
            self._open.pop(key).reader.close()


class Files:
    """Verified ranges of a step's files.  Thread-safe; the digest tables used last are kept."""

    def __init__(self, store: Store, prefix: str, manifest: Manifest, *, verify: bool) -> None:
        self.store = store
        self.prefix = prefix
        self.manifest = manifest
        self.verify = verify
        self.open = OpenFiles(store)
        self._tables: dict[str, Digests] = {}
        """The last used last."""
        self._reading: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def key(self, file: FileEntry) -> str:
        return self.prefix + file.path

    def table(self, file: FileEntry) -> Digests:
        """The digest of every chunk; Corrupt if the table itself is damaged."""
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

    def _kept(self, file: FileEntry) -> Digests | None:
        found = self._tables.pop(file.path, None)
        if found is not None:
            self._tables[file.path] = found
        return found

    def _keep(self, file: FileEntry, table: Digests) -> None:
        self._tables[file.path] = table
        while len(self._tables) > 1 and sum(t.nbytes for t in self._tables.values()) > TABLES_BYTES:
            del self._tables[next(iter(self._tables))]

    def _read_table(self, file: FileEntry) -> Digests:
        self._check_size(file)
        data = bytearray(file.bytes - file.table)
        self._read(file, file.table, memoryview(data))
        if (found := hexdigest(data)) != file.digest:
            raise Corrupt(
                f"digest table differs from the manifest: {found}, expected {file.digest}",
                key=self.key(file),
                start=file.table,
                stop=file.bytes,
                expected=file.digest,
                found=found,
                step=self.manifest.step,
            )
        return np.frombuffer(bytes(data), "<u8")

    def _check_size(self, file: FileEntry) -> None:
        """Before memory is set aside for what a manifest merely states."""
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
            with self.open.reader(self.key(file)) as reader:
                reader.read(offset, into)
        except HoldfastError as error:
            error.step = self.manifest.step
            raise
        count("read.bytes", len(into))

    def span(self, file: FileEntry, first: int, stop: int) -> tuple[int, int]:
        """Byte range of chunks first..stop."""
        size = self.manifest.chunk_bytes
        return first * size, min(stop * size, file.table)

    def chunks(self, file: FileEntry, first: int, stop: int, into: memoryview) -> memoryview:
        """Read and verify chunks first..stop into the head of `into`; returns that head."""
        a, b = self.span(file, first, stop)
        view = into[: b - a]
        self._read(file, a, view)
        self.check(file, first, view)
        return view

    def check(self, file: FileEntry, first: int, view: memoryview) -> None:
        """Corrupt if the chunks in `view`, beginning with chunk `first`, are not what was written."""
        if not self.verify:
            return
        size = self.manifest.chunk_bytes
        expected = self.table(file)[first : first + num_chunks(len(view), size)]
        bad = first_difference(view, expected, size)
        if bad is not None:
            a, b = self.span(file, first + bad, first + bad + 1)
            found = hexdigest(view[bad * size : (bad + 1) * size])
            raise Corrupt(
                f"bytes {a}..{b} differ from what was written: "
                f"digest {found}, expected {int(expected[bad]):016x}",
                key=self.key(file),
                start=a,
                stop=b,
                expected=f"{int(expected[bad]):016x}",
                found=found,
                step=self.manifest.step,
            )
