"""Random meshes, shardings and tables, and what they mean by brute force."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import strategies as st

from holdfast.core.layout.pieces import Table
from holdfast.layout import Box, Cut, Mesh, Sharding

Row = tuple[str, tuple[int, ...], int, Sharding]


@st.composite
def meshes(draw, most_axes: int = 3, most: int = 3) -> Mesh:
    sizes = draw(st.lists(st.integers(1, most), max_size=most_axes))
    return Mesh(tuple((f"a{i}", n) for i, n in enumerate(sizes)))


@st.composite
def shapes(draw, most_dims: int = 3) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 16]), max_size=most_dims)))


@st.composite
def boxes_in(draw, shape: tuple[int, ...]) -> Box:
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))


@st.composite
def regular(draw, mesh: Mesh, ndim: int) -> Sharding:
    """Cuts over some axes, a restriction to some coordinates of others."""
    axes = draw(st.permutations([name for name, _ in mesh.axes]))
    cuts, on = [], []
    while axes and ndim and draw(st.booleans()):
        take = draw(st.integers(1, min(2, len(axes))))
        cuts.append(Cut(draw(st.integers(0, ndim - 1)), tuple(axes[:take])))
        axes = axes[take:]
    for axis in axes:
        if draw(st.integers(0, 3)) == 0:
            coords = draw(st.sets(st.integers(0, mesh.sizes[axis] - 1), min_size=1))
            on.append((axis, tuple(sorted(coords))))
    return Sharding(tuple(cuts), tuple(sorted(on)))


@st.composite
def listed(draw, mesh: Mesh, shape: tuple[int, ...]) -> Sharding:
    """The tensor split again and again; every part listed with some rank."""
    parts = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4)) if shape else 0):
        box = parts.pop(draw(st.integers(0, len(parts) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(box.start[dim], box.stop[dim]))
        low, high = list(box.stop), list(box.start)
        low[dim] = high[dim] = at
        parts += [Box(box.start, tuple(low)), Box(tuple(high), box.stop)]
    ranks = st.integers(0, mesh.world - 1)
    return Sharding(held=tuple((draw(ranks), box) for box in parts if box.size))


@st.composite
def rows_on(draw, mesh: Mesh, most: int = 5) -> list[Row]:
    rows: list[Row] = []
    for i in range(draw(st.integers(1, most))):
        itemsize = draw(st.sampled_from([1, 2, 4, 8]))
        if rows and draw(st.integers(0, 2)) == 0:  # a class of several tensors
            _, shape, _, sharding = rows[draw(st.integers(0, len(rows) - 1))]
        else:
            shape = draw(shapes())
            kind = (
                listed(mesh, shape) if draw(st.integers(0, 3)) == 0 else regular(mesh, len(shape))
            )
            sharding = draw(kind)
        rows.append((f"t{i}", shape, itemsize, sharding))
    return rows


@st.composite
def layouts(draw) -> tuple[Mesh, list[Row], Table]:
    mesh = draw(meshes())
    rows = draw(rows_on(mesh))
    return mesh, rows, Table.of(rows)


def held_by(mesh: Mesh, rank: int, shape: tuple[int, ...], sharding: Sharding) -> np.ndarray:
    """Which elements a rank holds, element by element: the oracle, straight from the definitions.

    A regular cut is numpy's own division of index arrays as torch.chunk makes it.
    """
    mask = np.zeros(shape, bool)
    if sharding.held is not None:
        for holder, box in sharding.held:
            if holder == rank:
                mask[tuple(slice(a, b) for a, b in zip(box.start, box.stop))] = True
        return mask
    coords = dict(zip((n for n, _ in mesh.axes), np.unravel_index(rank, [n for _, n in mesh.axes])))
    if any(coords[axis] not in allowed for axis, allowed in sharding.on):
        return mask
    index = [list(range(n)) for n in shape]
    for cut in sharding.cuts:
        sizes = [mesh.sizes[a] for a in cut.axes]
        part = int(np.ravel_multi_index([coords[a] for a in cut.axes], sizes))
        left, parts = index[cut.dim], prod(sizes)
        step = -(-len(left) // parts)
        index[cut.dim] = left[part * step : (part + 1) * step]
    mask[np.ix_(*index)] = True
    return mask
