"""Locating: in which pieces of which ranks' images the boxes lie that a reader wants.

Of the classes that shardings place (`Placement`), the closed form is turned round: which parts a box
touches, and which replicas' shares these are.  Of those whose parts the manifest lists one by one, as where
each tensor has a sharding of its own, only the parts that meet what is wanted of a class are looked at, and
those of all classes together in one go.
"""

from __future__ import annotations

import numpy as np

from holdfast.core.layout.box import Box
from holdfast.core.layout.pieces import Ints, Located, Placement, padded, rows_between
from holdfast.core.layout.sharding import Sharding, parts_of

_Columns = tuple[Ints, ...]
"""The columns of `Located`."""

_ListedPart = tuple[int, int, int, Box]
"""Rank, byte in its image of the class's first tensor's part, bytes from one tensor's to the next, box."""


def locate(placement: Placement, tensor: Ints, start: Ints, stop: Ints) -> Located:
    """See `Placement.locate`."""
    found: list[_Columns] = []
    busy = np.flatnonzero(np.all(stop > start, axis=1))
    number = placement.class_of[tensor[busy]]
    is_listed = np.array([one.sharding.held is not None for one in placement.classes], bool)
    for one in np.unique(number[~is_listed[number]]).tolist():
        rows = busy[number == one]
        found.append(_in_cells(placement, one, rows, tensor[rows], start[rows], stop[rows]))
    if len(rows := busy[is_listed[number]]):
        found.append(_in_lists(placement, rows, tensor[rows], start[rows], stop[rows]))
    if not found:
        none = np.zeros((0, placement.table.shape.shape[1]), np.int64)
        return Located(none[:, 0], none[:, 0], none[:, 0], none, none, none, none)
    want, rank, offset, a, b, c, d = (np.concatenate(column) for column in zip(*found))
    return Located(want, rank, offset, a, b, c, d)


# -- parts in closed form ----------------------------------------------------------------------------


def _in_cells(
    placement: Placement, number: int, want: Ints, tensor: Ints, start: Ints, stop: Ints
) -> _Columns:
    sharding = placement.classes[number].sharding
    rows, part = _parts_touched(placement, sharding, tensor, start, stop)
    out = []
    for place in np.unique(part).tolist():
        mine = rows[part == place]
        out.append(
            _within_cells(
                placement, number, place, want[mine], tensor[mine], start[mine], stop[mine]
            )
        )
    return tuple(np.concatenate(c) for c in zip(*out))


def _parts_touched(
    placement: Placement, sharding: Sharding, tensor: Ints, start: Ints, stop: Ints
) -> tuple[Ints, Ints]:
    """(want row, part) for every part that a want touches: nested cuts, each expanded."""
    rows = np.arange(len(tensor))
    part = np.zeros(len(tensor), np.int64)
    lo = np.zeros_like(start)
    hi = placement.table.shape[tensor].copy()
    for cut in sharding.cuts:
        d, parts = cut.dim, parts_of(placement.mesh, cut.axes)
        step = np.maximum(-(-(hi[:, d] - lo[:, d]) // parts), 1)
        first = (np.maximum(start[rows, d], lo[:, d]) - lo[:, d]) // step
        last = (np.minimum(stop[rows, d], hi[:, d]) - 1 - lo[:, d]) // step
        source, at = _expand(first, last)
        rows, step = rows[source], step[source]
        part = part[source] * parts + at
        lo, hi = lo[source], hi[source]
        low = lo[:, d].copy()
        lo[:, d] = low + at * step
        hi[:, d] = np.minimum(low + (at + 1) * step, hi[:, d])
    return rows, part


def _within_cells(
    placement: Placement,
    number: int,
    part: int,
    want: Ints,
    tensor: Ints,
    start: Ints,
    stop: Ints,
) -> _Columns:
    """Find which replicas wrote the wanted rows of one part, and at what offset."""
    cells = placement.cells_of(number, part)
    index = placement.index_in_class[tensor]
    dim = cells.row_dim[index]
    each = np.arange(len(index))
    base, unit, at = cells.start[index, dim], cells.row_bytes[index], cells.ends[index]
    lo = at + (np.maximum(start[each, dim], base) - base) * unit
    hi = at + (np.minimum(stop[each, dim], cells.stop[index, dim]) - base) * unit
    shares = cells.bounds[cells.busy]
    first = np.searchsorted(shares, lo, "right") - 1
    last = np.searchsorted(shares, hi, "left") - 1
    source, nth = _expand(first, last)
    replica = cells.busy[nth]
    ranks = placement.holders(placement.classes[number].sharding, part)[replica]
    from_, to = cells.bounds[replica], cells.bounds[replica + 1]
    piece_start, piece_stop = rows_between(cells, index[source], from_, to)
    begin = np.maximum(cells.ends[index[source]], from_)
    bases = np.array([placement.base(int(r), number) for r in ranks.tolist()], np.int64)
    lower = np.maximum(start[source], piece_start)
    upper = np.minimum(stop[source], piece_stop)
    offset = bases + begin - from_
    columns = (want[source], ranks, offset, piece_start, piece_stop, lower, upper)
    keep = np.all(upper > lower, axis=1)
    return tuple(c[keep] for c in columns)


# -- parts that are listed ---------------------------------------------------------------------------


def _in_lists(placement: Placement, want: Ints, tensor: Ints, start: Ints, stop: Ints) -> _Columns:
    order = np.argsort(placement.class_of[tensor], kind="stable")
    want, tensor, start, stop = (x[order] for x in (want, tensor, start, stop))
    numbers, begins = np.unique(placement.class_of[tensor], return_index=True)
    low = np.minimum.reduceat(start, begins, axis=0).tolist()
    high = np.maximum.reduceat(stop, begins, axis=0).tolist()
    parts: list[_ListedPart] = []
    first, last = [], []
    for number, a, b in zip(numbers.tolist(), low, high):
        first.append(len(parts))
        parts += _parts_met(placement, number, Box(tuple(a), tuple(b)))
        last.append(len(parts) - 1)
    of = np.repeat(np.arange(len(numbers)), np.diff([*begins.tolist(), len(tensor)]))
    source, part = _expand(np.array(first, np.int64)[of], np.array(last, np.int64)[of])
    rank, at, step = (np.array([p[i] for p in parts], np.int64)[part] for i in range(3))
    begin, end = (side[part] for side in padded([p[3] for p in parts], start.shape[1]))
    lower, upper = np.maximum(start[source], begin), np.minimum(stop[source], end)
    offset = at + placement.index_in_class[tensor][source] * step
    keep = np.all(upper > lower, axis=1)
    columns = (want[source], rank, offset, begin, end, lower, upper)
    return tuple(c[keep] for c in columns)


def _parts_met(placement: Placement, number: int, asked: Box) -> list[_ListedPart]:
    """The listed parts of a class that meet a box: mostly the reader's own alone."""
    one = placement.classes[number]
    taken: dict[int, int] = {}
    """Bytes of each rank's parts of one tensor."""
    met = []
    for rank, box in one.sharding.held or ():
        at = taken.get(rank, 0)
        taken[rank] = at + box.size * one.itemsize
        if box & asked:
            met.append((rank, at, box))
    return [(rank, placement.base(rank, number) + at, taken[rank], box) for rank, at, box in met]


def _expand(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """For every i and every k in first[i]..last[i] inclusive: (i, k)."""
    count = np.maximum(last - first + 1, 0)
    source = np.repeat(np.arange(len(count)), count)
    nth = np.arange(len(source)) - np.repeat(np.cumsum(count) - count, count)
    return source, first[source] + nth
