"""Parts of another store's files as objects of a store, from which foreign checkpoints are read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.base.errors import Corrupt, FormatError
from holdfast.core.checkpoint.files import OpenReaders
from holdfast.core.format.dtypes import numpy_dtype
from holdfast.core.store import Reader, Store
from holdfast.core.store.contract import reads_of
from holdfast.core.store.views import PartReader, ViewStore
from holdfast.formats.read.unpickle import understood

FilePlace = tuple[str, int]
"""A file's key, and the first byte of a storage in it."""

ArchiveRange = tuple[str, int, int]
"""A file's key, and the byte range of a zip archive in it."""


@dataclass(frozen=True)
class Strided:
    """A dense storage that is not row-major; `strides` in elements."""

    path: str
    start: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        expected = 1
        for dim in reversed(self.order):
            if self.shape[dim] != 1 and self.strides[dim] != expected:
                raise FormatError(
                    f"a tensor of shape {self.shape} and strides {self.strides}: not dense",
                    key=self.path,
                    hint="save tensor.contiguous()",
                )
            expected *= self.shape[dim]

    @property
    def order(self) -> list[int]:
        """Dims from the outermost in memory to the innermost."""
        return sorted(range(len(self.shape)), key=lambda d: (-self.strides[d], -self.shape[d]))

    def read(self, store: Store) -> NDArray[np.uint8]:
        """All its bytes, in row-major order."""
        order, dtype = self.order, numpy_dtype(self.dtype)
        size, stop = prod(self.shape) * dtype.itemsize, store.size(self.path)
        if self.start + size > stop:  # before memory is allocated for a damaged file's size
            raise Corrupt(f"ends at byte {stop}, {self.start + size} are needed", key=self.path)
        raw = np.empty(size, np.uint8)
        store.read(self.path, self.start, memoryview(raw))  # type: ignore[arg-type]
        stored = raw.view(dtype).reshape([self.shape[d] for d in order])
        plain = np.ascontiguousarray(stored.transpose(np.argsort(order)))
        return plain.reshape(-1).view(np.uint8)


Locator = Callable[[], FilePlace | Strided]


def at_place(path: str, start: int) -> Locator:
    """A locator of a known place."""
    return lambda: (path, start)


def row_major_place(source: Locator) -> FilePlace:
    """Return the place of a row-major storage.  FormatError if it is not row-major."""
    place = source()
    if isinstance(place, Strided):
        raise FormatError(f"strides {place.strides}: not row-major", key=place.path)
    return place


@dataclass(frozen=True)
class Section:
    """Bytes of a storage from `skip` after its start; computed if there are several sources or a scale."""

    sources: tuple[Locator, ...]
    skip: int
    bytes: int
    dtype: str
    scale: float


class Sections(ViewStore):
    """Parts of another store's objects, by key."""

    shows = "a foreign checkpoint"

    def __init__(
        self, store: Store, sections: Mapping[str, Section], archives: tuple[ArchiveRange, ...] = ()
    ) -> None:
        self.url = store.url
        self.origin = store
        """The store in which the files themselves lie."""
        self.read_bytes, self.read_threads = reads_of(store)
        self.archives = archives
        """torch.save archives inside files; a file with torch.save's suffix is an archive itself."""
        self._sections = sections
        self._files = OpenReaders(store)
        """Sections that are open at once share the files they lie in."""
        self._lock = threading.Lock()
        self._last: tuple[str, NDArray[np.uint8]] | None = None

    def open(self, key: str) -> Reader:
        """See `Store.open`."""
        section = self._sections[key]
        with understood("foreign", key):
            places = [source() for source in section.sources]
        if isinstance(places[0], Strided):
            return _StridedReader(self, key, places[0])
        readers: list[Reader] = []
        try:
            for path, start in places:  # type: ignore[misc]
                readers.append(PartReader(_SharedReader(self._files, path), start + section.skip))
        except BaseException:
            for reader in readers:
                reader.close()
            raise
        if len(readers) == 1 and section.scale == 1.0:
            return readers[0]
        return _ComputedReader(readers, numpy_dtype(section.dtype), section.scale)

    def size(self, key: str) -> int:
        """See `Store.size`."""
        return self._sections[key].bytes

    def places(self, key: str) -> list[FilePlace]:
        """Return the place of a section; several if it is their mean.  May read files' headers."""
        section, found = self._sections[key], []
        for place in (source() for source in section.sources):
            path, start = (place.path, place.start) if isinstance(place, Strided) else place
            found.append((path, start + section.skip))
        return found

    def in_rows(self, key: str, strided: Strided) -> NDArray[np.uint8]:
        """The bytes of a storage in row-major order; caches the last one."""
        with self._lock:
            if self._last is None or self._last[0] != key:
                self._last = key, strided.read(self.origin)
            return self._last[1]

    def list(self, prefix: str = "") -> list[str]:
        """See `Store.list`."""
        return sorted(key for key in self._sections if key.startswith(prefix))


class _SharedReader:
    """A reader of an object that others may have open, too: it is opened once, and closed by the last."""

    def __init__(self, files: OpenReaders, key: str) -> None:
        self._files = files
        self._key = key
        self._kept = ExitStack()
        with ExitStack() as kept:
            kept.enter_context(files.kept())
            files.have(key)
            self._kept = kept.pop_all()

    def read(self, offset: int, into: memoryview) -> None:
        """See `Reader.read`."""
        self._files.read(self._key, offset, into)

    def close(self) -> None:
        """See `Reader.close`."""
        self._kept.close()


class _StridedReader:
    """A reader of a storage in row-major order, which must be read whole."""

    def __init__(self, sections: Sections, key: str, strided: Strided) -> None:
        self._sections = sections
        self._key = key
        self._strided = strided

    def read(self, offset: int, into: memoryview) -> None:
        """See `Reader.read`."""
        found = self._sections.in_rows(self._key, self._strided)
        into[:] = memoryview(found)[offset : offset + len(into)]  # type: ignore[arg-type]

    def close(self) -> None:
        """See `Reader.close`."""


class _ComputedReader:
    """A reader of the mean of several sections, times a factor, computed in their dtype."""

    def __init__(self, inner: Sequence[Reader], dtype: np.dtype[Any], scale: float) -> None:
        self._inner = inner
        self._dtype = dtype
        self._scale = scale

    def read(self, offset: int, into: memoryview) -> None:
        """See `Reader.read`."""
        self._inner[0].read(offset, into)
        values = np.frombuffer(into, self._dtype)
        other = bytearray(len(into) if len(self._inner) > 1 else 0)
        for reader in self._inner[1:]:
            reader.read(offset, memoryview(other))
            values += np.frombuffer(other, self._dtype)
        if len(self._inner) > 1:
            values /= self._dtype.type(len(self._inner))
        if self._scale != 1.0:
            values *= self._dtype.type(self._scale)

    def close(self) -> None:
        """See `Reader.close`."""
        for reader in self._inner:
            reader.close()
