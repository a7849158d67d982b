"""Shardings: how one tensor lies over a mesh, stated by constructor and not rank by rank.

A `Sharding` is a list of cuts applied from left to right.  `Cut(dim, axes)` divides the current part
along `dim` over the ranks of `axes` (several axes act as one flat axis) as `torch.chunk` does: equal
parts of `ceil(n / parts)`, the last ones shorter or empty.  Axes that no cut names hold replicas.
`on` keeps a tensor to some coordinates of an axis (a pipeline stage).  So

    fully_shard                Cut(0, ("dp",))
    colwise, then fully_shard  Cut(0, ("tp",)), Cut(0, ("dp",))      torch's _StridedShard
    rowwise, then fully_shard  Cut(1, ("tp",)), Cut(0, ("dp",))
    hybrid sharding            Cut(0, ("shard",))                    replicas along "replicate"
    stage 3 of a pipeline      on=(("pp", (3,)),)

Where a layout has no such form, `held` lists its fragments one by one: (rank, box).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from holdfast.core.layout.box import Box, whole
from holdfast.core.layout.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Cut:
    """Divide `dim` over the ranks of `axes`, taken as one flat axis, outermost first."""

    dim: int
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sharding:
    """Cuts from left to right; `on` restricts axes to coordinates; or fragments one by one."""

    cuts: tuple[Cut, ...] = ()
    on: tuple[tuple[str, tuple[int, ...]], ...] = ()
    held: tuple[tuple[int, Box], ...] | None = None

    def box(self, shape: tuple[int, ...], mesh: Mesh, rank: int) -> Box | None:
        """The box of a rank in a regular sharding; None if the rank has no part in the tensor."""
        assert self.held is None
        if any(mesh.coordinate(rank, axis) not in coords for axis, coords in self.on):
            return None
        box = whole(shape)
        for cut in self.cuts:
            box = chunk(box, cut.dim, part_of(mesh, rank, cut.axes), parts_of(mesh, cut.axes))
        return box

    def __str__(self) -> str:
        if self.held is not None:
            return f"{len(self.held)} listed fragments"
        cuts = [f"dim {c.dim} over {'*'.join(c.axes)}" for c in self.cuts]
        on = [f"on {axis} {','.join(map(str, coords))}" for axis, coords in self.on]
        return ", ".join([*cuts, *on]) or "replicated"


def chunk(box: Box, dim: int, part: int, parts: int) -> Box:
    """Part `part` of `box` cut along `dim` into `parts`, as torch.chunk cuts."""
    lo, hi = box.start[dim], box.stop[dim]
    step = -(-(hi - lo) // parts)
    a, b = min(lo + part * step, hi), min(lo + (part + 1) * step, hi)
    return Box(
        (*box.start[:dim], a, *box.start[dim + 1 :]), (*box.stop[:dim], b, *box.stop[dim + 1 :])
    )


def parts_of(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """Number of parts that a cut over `axes` makes."""
    return prod(mesh.sizes[a] for a in axes)


def part_of(mesh: Mesh, rank: int, axes: tuple[str, ...]) -> int:
    """Number of the part that a rank holds of a cut over `axes`."""
    part = 0
    for axis in axes:
        part = part * mesh.sizes[axis] + mesh.coordinate(rank, axis)
    return part
