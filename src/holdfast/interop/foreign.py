"""A foreign checkpoint as a manifest: tensors, and fragments that lie anywhere in any file.

Our own images follow from shardings in closed form; foreign fragments have to be listed.  Each counts as a
file of its own, a section of a real one, so that its elements are aligned; `Listed` answers `locate`
from the list.  All that reads (rows, blocks, sharing, restoring) stays as it is.  Foreign files have no
digests, so nothing is verified but lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.files import Files
from holdfast.checkpoint.opened import Checkpoint
from holdfast.codec.digest import ALGORITHM, CHUNK_BYTES
from holdfast.errors import FormatError, UsageError
from holdfast.format.dtypes import DTYPES
from holdfast.format.manifest import (
    VERSION,
    FileEntry,
    FragmentEntry,
    Manifest,
    ShardingEntry,
    TensorEntry,
)
from holdfast.layout import Box, Located, Mesh, Placement, Table, num_corners, tiles
from holdfast.store import Reader, Store, Writer
from holdfast.store.base import Bytes

Ints = NDArray[np.int64]

MAX_CORNERS = 1 << 24


Place = tuple[str, int]
"""A file's key, and where in it a fragment begins."""


@dataclass(frozen=True)
class Fragment:
    """A part of a tensor, contiguous and row-major in a file.  `place` is asked when it is read."""

    box: Box
    path: str
    place: Callable[[], Place]


@dataclass(frozen=True)
class Foreign:
    """A tensor of a foreign checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    state: str
    fragments: tuple[Fragment, ...]


class Sections:
    """A store to read from: parts of another store's objects, by key."""

    def __init__(self, store: Store, places: Mapping[str, tuple[Callable[[], Place], int]]) -> None:
        self.url = store.url
        self._store = store
        self._places = places
        """By key, what tells its place, and its length."""
        self._known: dict[str, Place] = {}

    def read(self, key: str, offset: int, into: memoryview) -> None:
        """As `Store.read`."""
        path, start = self._place(key)
        self._store.read(path, start + offset, into)

    def open(self, key: str) -> Reader:
        """As `Store.open`."""
        path, start = self._place(key)
        return _SectionReader(self._store.open(path), start)

    def size(self, key: str) -> int:
        """As `Store.size`."""
        return self._places[key][1]

    def get(self, key: str) -> bytes:
        """As `Store.get`."""
        data = bytearray(self.size(key))
        self.read(key, 0, memoryview(data))
        return bytes(data)

    def list(self, prefix: str = "") -> list[str]:
        """As `Store.list`."""
        return sorted(key for key in self._places if key.startswith(prefix))

    def put(self, key: str, data: Bytes, *, if_absent: bool = False) -> None:
        """UsageError: nothing is written into foreign checkpoints."""
        raise UsageError(f"{self.url} is a foreign checkpoint: holdfast only reads it", key=key)

    def create(self, key: str, size: int) -> Writer:
        """UsageError."""
        raise UsageError(f"{self.url} is a foreign checkpoint: holdfast only reads it", key=key)

    def delete(self, key: str) -> None:
        """UsageError."""
        raise UsageError(f"{self.url} is a foreign checkpoint: holdfast only reads it", key=key)

    def _place(self, key: str) -> Place:
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._places[key][0]()
        return found


class _SectionReader:
    """A reader of a section."""

    def __init__(self, inner: Reader, start: int) -> None:
        self._inner = inner
        self._start = start

    def read(self, offset: int, into: memoryview) -> None:
        """As `Reader.read`."""
        self._inner.read(self._start + offset, into)

    def close(self) -> None:
        """As `Reader.close`."""
        self._inner.close()


class Listed(Placement):
    """Where listed fragments lie: each at the start of its own file."""

    def __init__(
        self, mesh: Mesh, table: Table, boxes: Sequence[Sequence[tuple[int, Box]]]
    ) -> None:
        super().__init__(mesh, table)
        self._boxes = boxes
        """By tensor, (file's number, box)."""

    def locate(self, tensor: Ints, start: Ints, stop: Ints) -> Located:
        """As `Placement.locate`."""
        width = self.table.shape.shape[1]
        rows: list[tuple[int, int, Ints, Ints, Ints, Ints]] = []
        for want, number in enumerate(tensor.tolist()):
            low, high = start[want], stop[want]
            for file, box in self._boxes[number] if np.all(high > low) else ():
                a, b = _padded(box.start, 0, width), _padded(box.stop, 1, width)
                lower, upper = np.maximum(a, low), np.minimum(b, high)
                if np.all(upper > lower):
                    rows.append((want, file, a, b, lower, upper))
        want_, file_ = (np.array([r[i] for r in rows], np.int64) for i in (0, 1))
        a, b, lower, upper = (
            np.array([r[i] for r in rows], np.int64).reshape(len(rows), width) for i in range(2, 6)
        )
        return Located(want_, file_, np.zeros(len(rows), np.int64), a, b, lower, upper)


def _padded(numbers: tuple[int, ...], fill: int, width: int) -> Ints:
    return np.array([*numbers, *[fill] * (width - len(numbers))], np.int64)


def foreign(
    store: Store,
    tensors: Sequence[Foreign],
    *,
    step: int,
    software: Mapping[str, str],
    extras: Mapping[str, Any],
) -> Checkpoint:
    """A checkpoint of `tensors`, whose fragments lie in the files of a store.

    FormatError if fragments overlap or leave a hole.
    """
    entries, shardings, boxes = [], [], []
    files: list[FileEntry] = []
    places: dict[str, tuple[Callable[[], Place], int]] = {}
    for number, t in enumerate(tensors):
        _check(t)
        held, mine = [], []
        for fragment in t.fragments:
            size = fragment.box.size * DTYPES[t.dtype].bytes
            key, rank = f"{fragment.path}:{len(files)}", len(files)
            places[key] = fragment.place, size
            files.append(FileEntry(rank, key, size, 0, size, size, ""))
            held.append(FragmentEntry(rank, fragment.box.start, fragment.box.stop))
            mine.append((rank, fragment.box))
        shardings.append(ShardingEntry(held=tuple(held)))
        entries.append(TensorEntry(t.name, t.dtype, t.shape, number, t.state))
        boxes.append(mine)
    manifest = Manifest(
        VERSION, step, 0, "", "", dict(software), (("file", max(len(files), 1)),), CHUNK_BYTES,
        ALGORITHM, tuple(shardings), tuple(entries), {}, tuple(files), dict(extras), {},
    )  # fmt: skip
    listed = Listed(manifest.layout, manifest.placement.table, boxes)
    manifest.__dict__["placement"] = listed  # instead of the closed form of our own images
    found = Checkpoint(Sections(store, places), manifest, verify=False)
    found.files = Files(found.store, "", manifest, verify=False)
    return found


def _check(t: Foreign) -> None:
    if t.dtype not in DTYPES:
        raise FormatError(f"{t.name!r}: unknown dtype {t.dtype!r}")
    boxes = [f.box for f in t.fragments]
    inside = all(
        len(b.start) == len(b.stop) == len(t.shape)
        and all(0 <= lo <= hi <= n for lo, hi, n in zip(b.start, b.stop, t.shape))
        for b in boxes
    )
    if not inside or num_corners(boxes, t.shape) > MAX_CORNERS or not tiles(boxes, t.shape):
        raise FormatError(
            f"{t.name!r}: its parts do not make up {t.shape} exactly once",
            hint="a part may be missing: was the checkpoint copied whole?",
        )
