"""A foreign checkpoint as a manifest: tensors with parts anywhere in any file.

holdfast's images follow from shardings in closed form; foreign parts are listed.  Each part counts as a
file of its own, a section of a real file, so that its elements are aligned; `Listed` implements `locate`
by the list. All code that reads (rows, blocks, sharing, restoring) stays the same.  A part with several
sources is their mean, which is computed when it is read.  Foreign files have no digests, so only lengths
are verified.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.base.errors import FormatError, LayoutError, NotFound
from holdfast.core.checkpoint.files import Files
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.codec.digest import ALGORITHM, CHUNK_BYTES
from holdfast.core.format.checking import MAX_DIMS
from holdfast.core.format.dtypes import DTYPES, numpy_dtype
from holdfast.core.format.manifest import (
    FORMAT_VERSION,
    FileEntry,
    FragmentEntry,
    Manifest,
    ReplicaRule,
    ShardingEntry,
    TensorEntry,
)
from holdfast.core.layout import Box, Fragment, Mesh, Stored, num_corners, tiles
from holdfast.core.layout.box import is_inside
from holdfast.core.layout.pieces import Located, Placement, Table, padded
from holdfast.core.store import Store
from holdfast.formats.read.sections import ArchiveRange, Locator, Section, Sections

_Ints = NDArray[np.int64]

_MAX_CORNERS = 1 << 24
FREE_BYTES, MAX_SHARED = 1 << 26, 16
"""Bytes of tensors that are always allowed; above that, most bytes of tensors per byte of their files."""


@dataclass(frozen=True)
class StoredPart:
    """A fragment, and its storages; the value is the mean of several storages.

    `sources` are called when the part is read; `path`: for messages.
    """

    fragment: Fragment
    sources: tuple[Locator, ...]
    path: str

    @staticmethod
    def of(box: Box, path: str, place: Locator) -> StoredPart:
        """A dense box at a place."""
        return StoredPart(Fragment.dense(box), (place,), path)


@dataclass(frozen=True)
class Foreign:
    """A tensor of a foreign checkpoint.  `copies`: further complete sets of parts, from replicas."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    state: str
    parts: tuple[StoredPart, ...]
    replica: ReplicaRule = "unique"
    copies: tuple[tuple[StoredPart, ...], ...] = ()


class Listed(Placement):
    """Placement of listed fragments, each at the start of its own file."""

    def fresh(self) -> Listed:
        """Return itself: what it caches is bounded."""
        return self

    def __init__(self, mesh: Mesh, table: Table, parts: Sequence[Sequence[_Held]]) -> None:
        super().__init__(mesh, table)
        self._parts = parts
        """Parts of each tensor, by its number."""
        self._bounds = lru_cache(1024)(self._bounds_of)

    def _bounds_of(self, tensor: int) -> tuple[_Ints, _Ints]:
        """Starts and stops of a tensor's parts, padded."""
        return padded([h.box for h in self._parts[tensor]], self.table.shape.shape[1])

    def locate(self, tensor: _Ints, start: _Ints, stop: _Ints) -> Located:
        """See `Placement.locate`."""
        want, held, columns = [], [], []
        for row, number in enumerate(tensor.tolist()):
            low, high = self._bounds(number)
            lower, upper = np.maximum(low, start[row]), np.minimum(high, stop[row])
            hit = np.flatnonzero(np.all(upper > lower, axis=1))
            want += [row] * len(hit)
            held += [self._parts[number][i] for i in hit.tolist()]
            columns.append((low[hit], high[hit], lower[hit], upper[hit]))
        width = self.table.shape.shape[1]
        none = np.zeros((0, width), np.int64)
        low, high, lower, upper = (
            np.concatenate([none, *(c[i] for c in columns)]) for i in range(4)
        )
        files = np.array([h.file for h in held], np.int64)
        stored = [h.stored for h in held] if any(h.stored for h in held) else None
        rows = np.array(want, np.int64)
        return Located(rows, files, np.zeros_like(files), low, high, lower, upper, stored)


@dataclass(frozen=True, slots=True)
class _Held:
    """A part and the number of its file; `stored`: its layout if it is not dense."""

    file: int
    box: Box
    stored: Stored | None


def foreign(
    store: Store,
    tensors: Sequence[Foreign],
    *,
    step: int,
    software: Mapping[str, str],
    extras: Mapping[str, Any],
    archives: Iterable[ArchiveRange] = (),
    aliases: Mapping[str, str] | None = None,
) -> Checkpoint:
    """Return a checkpoint of `tensors`, whose parts are in files of `store`.

    FormatError if parts overlap or leave a hole.  `others` of the checkpoint are the further copies of
    replicated tensors.  `archives`: zip archives in the files, whose CRC-32 can be verified.
    `aliases`: further names of tensors.
    """
    manifest, sections = _listed(tensors, step, software, extras, aliases or {})
    _check_cost(store, tensors)
    files = Sections(store, sections, tuple(archives))
    found = Checkpoint(files, manifest, verify=False)
    found.images = Files(files, "", manifest, verify=False)
    copies: list[list[Foreign]] = [
        [] for _ in range(max((len(t.copies) for t in tensors), default=0))
    ]
    for t in tensors:
        for others, parts in zip(copies, t.copies):
            others.append(replace(t, parts=parts, copies=()))
    found.others = tuple(
        foreign(store, others, step=step, software=software, extras={}) for others in copies
    )
    return found


def _listed(
    tensors: Sequence[Foreign],
    step: int,
    software: Mapping[str, str],
    extras: Mapping[str, Any],
    aliases: Mapping[str, str],
) -> tuple[Manifest, dict[str, Section]]:
    """Return the manifest, and the section of each of its files, by key."""
    names = Counter(t.name for t in tensors)
    if len(names) != len(tensors):
        raise FormatError(f"two tensors are named {names.most_common(1)[0][0]!r}")
    entries, shardings, parts = [], [], []
    files: list[FileEntry] = []
    sections: dict[str, Section] = {}
    for number, t in enumerate(tensors):
        _check(t)
        mine = []
        for part in t.parts:
            section = _section(t, part)
            key, rank = f"{part.path}:{len(files)}", len(files)
            sections[key] = section
            files.append(FileEntry(rank, key, section.bytes, 0, section.bytes, section.bytes, ""))
            mine.append(_Held(rank, part.fragment.box, _stored(t, part)))
        held = tuple(FragmentEntry(h.file, h.box.start, h.box.stop) for h in mine)
        shardings.append(ShardingEntry(held=held))
        entries.append(TensorEntry(t.name, t.dtype, t.shape, number, t.state, t.replica))
        parts.append(mine)
    manifest = Manifest(
        FORMAT_VERSION, step, 0, "", "", dict(software), (("file", max(len(files), 1)),), CHUNK_BYTES,
        ALGORITHM, tuple(shardings), tuple(entries), dict(aliases), tuple(files), dict(extras), {},
    )  # fmt: skip
    listed = Listed(manifest.layout, manifest.placement.table, parts)
    manifest.__dict__["placement"] = listed  # replaces the closed form
    return manifest, sections


def _section(t: Foreign, part: StoredPart) -> Section:
    itemsize = DTYPES[t.dtype].bytes
    fragment = part.fragment
    computed = len(part.sources) > 1 or fragment.scale != 1.0
    if not part.sources or (computed and numpy_dtype(t.dtype).kind not in "fVc"):
        raise FormatError(f"{t.name!r}: no mean or scale of {t.dtype}", key=part.path)
    size = fragment.span * itemsize
    return Section(part.sources, fragment.offset * itemsize, size, t.dtype, fragment.scale)


def _stored(t: Foreign, part: StoredPart) -> Stored | None:
    if part.fragment.is_dense:
        return None
    try:
        return part.fragment.stored()
    except LayoutError as error:
        raise FormatError(f"{t.name!r}: {error}", key=part.path) from None


def _check_cost(store: Store, tensors: Sequence[Foreign]) -> None:
    """FormatError if tensors are many times larger than their files, by `expand` or shared storages.
    Asks for no more file sizes than needed to exclude that."""
    wanted = sum(prod(t.shape) * DTYPES[t.dtype].bytes for t in tensors if t.dtype in DTYPES)
    have, missing = FREE_BYTES, None
    for path in dict.fromkeys(part.path for t in tensors for part in t.parts):
        if wanted <= have:
            return
        try:
            have += MAX_SHARED * store.size(path)
        except NotFound as error:
            missing = error
    if wanted > have:
        raise missing or FormatError(
            f"tensors of {wanted} bytes share those of files that are far smaller",
            key=store.url,
            hint="save tensor.contiguous()",
        )


def _check(t: Foreign) -> None:
    if t.dtype not in DTYPES:
        raise FormatError(f"{t.name!r}: unknown dtype {t.dtype!r}")
    plain = len(t.shape) <= MAX_DIMS and all(type(n) is int and n >= 0 for n in t.shape)
    if not plain or prod(max(n, 1) for n in t.shape) * DTYPES[t.dtype].bytes >= 1 << 60:
        raise FormatError(f"{t.name!r}: a tensor of shape {t.shape}"[:200])
    if any(p.fragment.offset < 0 for p in t.parts):
        raise FormatError(f"{t.name!r}: a part that begins before its storage")
    boxes = [p.fragment.box for p in t.parts]
    inside = all(is_inside(b, t.shape) for b in boxes)
    if not inside or num_corners(boxes, t.shape) > _MAX_CORNERS or not tiles(boxes, t.shape):
        raise FormatError(
            f"{t.name!r}: its parts do not make up {t.shape} exactly once",
            hint="a part may be missing: was the checkpoint copied whole?",
        )
