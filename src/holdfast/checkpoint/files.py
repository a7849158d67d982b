"""A step's files: byte ranges that are verified by their digests before anybody sees them."""

from __future__ import annotations

import threading

from holdfast.checkpoint.readers import Readers
from holdfast.codec.table import DigestTable
from holdfast.errors import Corrupt, HoldfastError
from holdfast.events import count
from holdfast.format.manifest import FileEntry, Manifest
from holdfast.store import Store

TABLES_BYTES = 32 << 20
"""Most bytes of digest tables to keep: those of a terabyte."""


class Files:
    """Verified ranges of a step's files.  Thread-safe; the digest tables used last are kept."""

    def __init__(self, store: Store, prefix: str, manifest: Manifest, *, verify: bool) -> None:
        self.store = store
        self.prefix = prefix
        self.manifest = manifest
        self.verify = verify
        self.readers = Readers(store)
        self._tables: dict[str, DigestTable] = {}
        """Tables by file path, in order of use: the one used last comes last."""
        self._reading: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def key(self, file: FileEntry) -> str:
        return self.prefix + file.path

    def table(self, file: FileEntry) -> DigestTable:
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
        self._check_size(file)
        data = bytearray(file.bytes - file.table)
        self._read(file, file.table, memoryview(data))
        try:
            return DigestTable.of(data, file.digest, file.table, self.manifest.chunk_bytes)
        except Corrupt as error:
            self._say_where(error, file)
            raise

    def _check_size(self, file: FileEntry) -> None:
        """Corrupt unless the file is as long as stated; before memory is set aside for it."""
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
        table = self.table(file)
        try:
            table.check(first, view)
        except Corrupt as error:
            self._say_where(error, file)
            raise

    def _say_where(self, error: Corrupt, file: FileEntry) -> None:
        """Add the file and the step that an error is of."""
        error.key, error.step = self.key(file), self.manifest.step
