"""Placement: who writes which bytes and where they then lie, in closed form, one rank at a time.

Tensors with one sharding and one dtype size form a *class*.  Ranks with the same coordinates on the
cut axes hold the same part of every tensor of the class; they are its replicas and share the work:
their parts, one tensor after the other, make one long string of bytes, which is divided evenly among
them.  A division inside a large tensor falls on a row; a small tensor is never divided.  A rank's
*pieces* are its share of every class, class after class (wide dtypes first, so that elements stay
aligned), and pieces lie back to back in its image.  For four ranks, as axes dp = 2 and tp = 2, and a
class of three tensors that tp cuts:

    coordinates     tp = 0                        tp = 1
    the part        | a0   | b0   | c0   |        | a1   | b1   | c1   |
    dp shares it    |-- dp 0 --|-- dp 1 --|       |-- dp 0 --|-- dp 1 --|
    written by      rank 0       rank 2           rank 1       rank 3

Hence the offset of any element in any rank's image follows from the shardings alone: no list of
ranks x tensors exists anywhere, and `locate` answers for one reader in time proportional to what the
reader wants.

    >>> from holdfast.core.layout import Cut
    >>> table = Table.of([("w", (8, 4), 4, Sharding((Cut(0, ("dp",)),)))])
    >>> placement = Placement(Mesh((("dp", 2),)), table)
    >>> placement.pieces(1).start.tolist(), placement.pieces(1).bytes.tolist()
    ([[4, 0]], [64])

Everything is in numpy arrays with one row per piece: 45,000 tensors on 4,096 ranks are planned in a
fraction of a second (bench/claims/plan_scale.py).  Tensors of fewer dims are padded with trailing ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

from holdfast.core.layout.box import Box
from holdfast.core.layout.fragment import Stored
from holdfast.core.layout.mesh import Mesh
from holdfast.core.layout.sharding import Sharding, part_of, parts_of

Ints = NDArray[np.int64]

_KEPT_ROWS = 1 << 21
"""Most rows of cached cells, one per tensor of a part: about 100 bytes each."""

MIN_SHARE_BYTES = 1 << 20
"""Tensors whose part is smaller are written by one replica, whole; shares are not made smaller."""


@dataclass(frozen=True)
class Table:
    """A checkpoint's tensors as arrays: shapes padded to as many dims, item sizes, shardings."""

    names: tuple[str, ...]
    ndim: Ints
    shape: Ints
    itemsize: Ints
    shardings: tuple[Sharding, ...]
    sharding: Ints

    @staticmethod
    def of(rows: Iterable[tuple[str, tuple[int, ...], int, Sharding]]) -> Table:
        """Build a table from (name, shape, item size in bytes, sharding) per tensor."""
        rows = list(rows)
        shardings = tuple(dict.fromkeys(r[3] for r in rows))
        index = {s: i for i, s in enumerate(shardings)}
        return Table.build(
            [r[0] for r in rows],
            [r[1] for r in rows],
            [r[2] for r in rows],
            shardings,
            [index[r[3]] for r in rows],
        )

    @staticmethod
    def build(
        names: list[str],
        shapes: list[tuple[int, ...]],
        itemsizes: list[int],
        shardings: tuple[Sharding, ...],
        sharding: list[int],
    ) -> Table:
        ndim = np.array([len(s) for s in shapes], np.int64)
        width = max([1, *(len(s) for s in shapes)])
        shape = np.ones((len(names), width), np.int64)
        for n in set(ndim.tolist()) - {0}:
            rows = np.flatnonzero(ndim == n)
            shape[rows, :n] = [shapes[i] for i in rows]
        return Table(
            tuple(names),
            ndim,
            shape,
            np.array(itemsizes, np.int64),
            shardings,
            np.array(sharding, np.int64),
        )


@dataclass(frozen=True)
class Pieces:
    """A rank's pieces in image order; row i: tensor, box (padded), byte offset, bytes."""

    tensor: Ints
    start: Ints
    stop: Ints
    offset: Ints
    bytes: Ints

    @property
    def total_bytes(self) -> int:
        return int(self.bytes.sum())


@dataclass(frozen=True)
class Located:
    """Places of wanted boxes; row i: which want, whose image, the piece, the common box."""

    want: Ints
    rank: Ints
    offset: Ints
    piece_start: Ints
    piece_stop: Ints
    start: Ints
    stop: Ints
    stored: Sequence[Stored | None] | None = None
    """Layouts of pieces that are not dense, by row; None where all are dense."""


@dataclass(frozen=True)
class _Class:
    """The tensors that share a sharding and an item size."""

    tensors: Ints
    sharding: Sharding
    itemsize: int


@dataclass(frozen=True)
class _Cells:
    """Part of a class that replicas at one place of the cut axes hold, and how they divide it."""

    start: Ints
    stop: Ints
    row_dim: Ints
    row_bytes: Ints
    ends: Ints
    """`ends[i]..ends[i + 1]`: bytes of tensor i in the string of all parts."""
    bounds: Ints
    """`bounds[j]..bounds[j + 1]`: share of replica j."""
    busy: Ints
    """Replicas whose share is not empty."""


@dataclass
class Placement:
    """The closed form for one mesh and table.  Caches what it has computed; not thread-safe."""

    mesh: Mesh
    table: Table
    _cells: dict[tuple[int, int], _Cells] = field(default_factory=dict)
    _kept: int = 0
    _bases: dict[int, dict[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        keys = self.table.sharding * 64 + self.table.itemsize
        order: dict[int, tuple[int, int]] = {}
        for key in dict.fromkeys(keys.tolist()):
            order[key] = (-(key % 64), len(order))
        self.classes = []
        self.class_of = np.zeros(len(keys), np.int64)
        self.index_in_class = np.zeros(len(keys), np.int64)
        for number, key in enumerate(sorted(order, key=order.__getitem__)):
            rows = np.flatnonzero(keys == key)
            self.class_of[rows] = number
            self.index_in_class[rows] = np.arange(len(rows))
            sharding = self.table.shardings[int(self.table.sharding[rows[0]])]
            self.classes.append(_Class(rows, sharding, key % 64))

    def fresh(self) -> Placement:
        """The same, with nothing cached yet."""
        return Placement(self.mesh, self.table)

    # -- one rank's image ---------------------------------------------------------------------

    def pieces(self, rank: int) -> Pieces:
        """The pieces that `rank` writes, in image order."""
        parts = [self._pieces_of(number, rank) for number in range(len(self.classes))]
        columns = [np.concatenate(c) for c in zip(*(p for p in parts if p is not None))]
        if not columns:
            none = np.zeros((0, self.table.shape.shape[1]), np.int64)
            return Pieces(none[:, 0], none, none, none[:, 0], none[:, 0])
        tensor, start, stop, size = columns
        keep = size > 0
        size = size[keep]
        return Pieces(tensor[keep], start[keep], stop[keep], np.cumsum(size) - size, size)

    def _pieces_of(self, number: int, rank: int) -> tuple[Ints, Ints, Ints, Ints] | None:
        one = self.classes[number]
        if one.sharding.held is not None:
            return self._listed(number, rank)
        place = self.place(one.sharding, rank)
        if place is None:
            return None
        cells = self.cells_of(number, place[0])
        lo, hi = cells.bounds[place[1]], cells.bounds[place[1] + 1]
        first = max(int(np.searchsorted(cells.ends, lo, "right")) - 1, 0)
        last = int(np.searchsorted(cells.ends, hi, "left"))
        rows = np.arange(first, max(last, first))
        start, stop = rows_between(cells, rows, lo, hi)
        size = np.prod(stop - start, axis=1) * one.itemsize
        return one.tensors[rows], start, stop, size

    def _listed(self, number: int, rank: int) -> tuple[Ints, Ints, Ints, Ints]:
        one = self.classes[number]
        boxes = [box for holder, box in one.sharding.held or () if holder == rank]
        start, stop = padded(boxes, self.table.shape.shape[1])
        count = len(one.tensors)
        start, stop = np.tile(start, (count, 1)), np.tile(stop, (count, 1))
        size = np.prod(stop - start, axis=1) * one.itemsize
        return np.repeat(one.tensors, len(boxes)), start, stop, size

    def place(self, sharding: Sharding, rank: int) -> tuple[int, int] | None:
        """(which part over all cuts, which replica of it) of a rank; None if it has no part."""
        if not 0 <= rank < self.mesh.world:
            return None
        part = 0
        for cut in sharding.cuts:
            part = part * parts_of(self.mesh, cut.axes) + part_of(self.mesh, rank, cut.axes)
        replica = 0
        for axis, coords in self._replica_axes(sharding):
            at = self.mesh.coordinate(rank, axis)
            if at not in coords:
                return None
            replica = replica * len(coords) + coords.index(at)
        return part, replica

    def _replica_axes(self, sharding: Sharding) -> list[tuple[str, Sequence[int]]]:
        cut = {axis for c in sharding.cuts for axis in c.axes}
        on = dict(sharding.on)
        return [
            (name, on.get(name, range(size))) for name, size in self.mesh.axes if name not in cut
        ]

    def holders(self, sharding: Sharding, part: int) -> Ints:
        """Ranks that hold a part (numbered over all cuts), in replica order."""
        base = 0
        for cut in reversed(sharding.cuts):
            for axis in reversed(cut.axes):
                part, at = divmod(part, self.mesh.sizes[axis])
                base += at * self.mesh.strides[axis]
        ranks = np.array([base], np.int64)
        for axis, coords in self._replica_axes(sharding):
            steps = np.array(coords, np.int64) * self.mesh.strides[axis]
            ranks = (ranks[:, None] + steps[None, :]).reshape(-1)
        return ranks

    def cells_of(self, number: int, part: int) -> _Cells:
        found = self._cells.get((number, part))
        if found is None:
            self._kept += len(self.classes[number].tensors)
            if self._kept > _KEPT_ROWS:
                self._cells.clear()
                self._kept = 0
            found = self._cells[number, part] = self._make_cells(self.classes[number], part)
        return found

    def _make_cells(self, one: _Class, part: int) -> _Cells:
        stop = self.table.shape[one.tensors].copy()
        start = np.zeros_like(stop)
        parts = [parts_of(self.mesh, c.axes) for c in one.sharding.cuts]
        for i, cut in enumerate(one.sharding.cuts):
            at = part // prod(parts[i + 1 :]) % parts[i]
            lo, hi = start[:, cut.dim].copy(), stop[:, cut.dim].copy()
            step = -(-(hi - lo) // parts[i])
            start[:, cut.dim] = np.minimum(lo + at * step, hi)
            stop[:, cut.dim] = np.minimum(lo + (at + 1) * step, hi)
        extent = stop - start
        size = np.prod(extent, axis=1) * one.itemsize
        row_dim = np.argmax(extent > 1, axis=1)
        rows = np.maximum(np.take_along_axis(extent, row_dim[:, None], 1)[:, 0], 1)
        row_bytes = np.maximum(size // rows, 1)
        ends = np.concatenate([[0], np.cumsum(size)])
        replicas = prod(len(c) for _, c in self._replica_axes(one.sharding))
        bounds = _divide(ends, size, row_bytes, replicas)
        busy = np.flatnonzero(bounds[1:] > bounds[:-1])
        return _Cells(start, stop, row_dim, row_bytes, ends, bounds, busy)

    # -- reading --------------------------------------------------------------------------------

    def locate(self, tensor: Ints, start: Ints, stop: Ints) -> Located:
        """Locate box `start[i]..stop[i]` (padded with 0..1) of tensor `tensor[i]`, for all i.

        Empty boxes yield no rows.  Offsets count from the first piece of the image of `rank`.
        """
        from holdfast.core.layout.locating import locate

        return locate(self, tensor, start, stop)

    def base(self, rank: int, number: int) -> int:
        """Byte at which class `number` begins, from the first piece of a rank's image."""
        bases = self._bases.get(rank)
        if bases is None:
            bases, at = {}, 0
            for other, one in enumerate(self.classes):
                bases[other] = at
                at += self._share_bytes(other, one, rank)
            self._bases[rank] = bases
        return bases[number]

    def _share_bytes(self, number: int, one: _Class, rank: int) -> int:
        if one.sharding.held is not None:
            sizes = (box.size for holder, box in one.sharding.held if holder == rank)
            return sum(sizes) * one.itemsize * len(one.tensors)
        place = self.place(one.sharding, rank)
        if place is None:
            return 0
        bounds = self.cells_of(number, place[0]).bounds
        return int(bounds[place[1] + 1] - bounds[place[1]])


def _divide(ends: Ints, size: Ints, row_bytes: Ints, replicas: int) -> Ints:
    """Divide the string evenly among replicas, on rows of large tensors, never in small ones.

    Only as many replicas share as there are megabytes: a reader of scalars that every rank holds
    must not have to visit every rank's file.
    """
    total = int(ends[-1])
    sharers = min(replicas, max(-(-total // MIN_SHARE_BYTES), 1))
    each, left = divmod(total, sharers)  # total * j could overflow
    index = np.minimum(np.arange(replicas + 1, dtype=np.int64), sharers)
    ideal: Ints = each * index + left * index // sharers
    if replicas == 1 or total == 0:
        return ideal
    inner = ideal[1:-1]
    at = np.clip(np.searchsorted(ends, inner, "right") - 1, 0, len(size) - 1)
    unit = np.where(size[at] < MIN_SHARE_BYTES, np.maximum(size[at], 1), row_bytes[at])
    snapped = ends[at] + (inner - ends[at] + unit // 2) // unit * unit
    ideal[1:-1] = np.minimum(snapped, ends[at + 1])
    return ideal


def padded(boxes: Sequence[Box], width: int) -> tuple[Ints, Ints]:
    """Starts and stops, a row per box; missing dims are 0..1."""
    start = np.zeros((len(boxes), width), np.int64)
    stop = np.ones((len(boxes), width), np.int64)
    for n in {len(b.start) for b in boxes} - {0}:
        rows = [i for i, b in enumerate(boxes) if len(b.start) == n]
        start[rows, :n] = [boxes[i].start for i in rows]
        stop[rows, :n] = [boxes[i].stop for i in rows]
    return start, stop


def rows_between(cells: _Cells, index: Ints, lo: Ints, hi: Ints) -> tuple[Ints, Ints]:
    """The boxes of tensors `index` that lie in bytes `lo..hi` of the string."""
    start, stop = cells.start[index].copy(), cells.stop[index].copy()
    dim, unit, at = cells.row_dim[index], cells.row_bytes[index], cells.ends[index]
    each = np.arange(len(index))
    base, top = start[each, dim], stop[each, dim]
    rows_lo = np.maximum(lo - at, 0) // unit
    rows_hi = np.maximum(hi - at, 0) // unit
    start[each, dim] = np.minimum(base + rows_lo, top)
    stop[each, dim] = np.minimum(base + rows_hi, top)
    return start, stop
