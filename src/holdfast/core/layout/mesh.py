"""Meshes: named axes over the ranks.

Ranks are numbered row-major over the axes, as `init_device_mesh` does: the last axis is the fastest.
A framework knows its axes one by one (this tensor is cut over four ranks that are two apart); an
`Axis` holds just that, and `common_mesh` finds the one mesh in which every axis is a run of axes.

    >>> mesh, where = common_mesh({Axis(1, 8), Axis(1, 4, "tp")}, world=8)
    >>> mesh.axes, where[Axis(1, 8)]
    ((('axis0', 2), ('tp', 4)), ('axis0', 'tp'))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from holdfast.base.errors import LayoutError


@dataclass(frozen=True)
class Mesh:
    """Named axes and their sizes, outermost first; ranks are row-major over them."""

    axes: tuple[tuple[str, int], ...] = ()

    @cached_property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    @cached_property
    def strides(self) -> dict[str, int]:
        """Distance in rank between two neighbours along an axis, by axis."""
        sizes = [n for _, n in self.axes]
        return {name: prod(sizes[i + 1 :]) for i, (name, _) in enumerate(self.axes)}

    @cached_property
    def world(self) -> int:
        return prod(n for _, n in self.axes)

    def coordinate(self, rank: int, axis: str) -> int:
        return rank // self.strides[axis] % self.sizes[axis]

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.axes) or "1 rank"


@dataclass(frozen=True, slots=True)
class Axis:
    """`size` ranks, `stride` apart; the name is a hint and no part of equality."""

    stride: int
    size: int
    name: str | None = field(default=None, compare=False)


def common_mesh(axes: Iterable[Axis], world: int) -> tuple[Mesh, dict[Axis, tuple[str, ...]]]:
    """The coarsest mesh of `world` ranks in which each axis is a run of consecutive axes.

    Raises LayoutError where there is none (ranks permuted, sizes that do not divide).
    """
    axes = [a for a in axes if a.size > 1]
    bounds = sorted({1, world, *(a.stride for a in axes), *(a.stride * a.size for a in axes)})
    if any(b % a for a, b in zip(bounds, bounds[1:])) or bounds[-1] != world:
        raise LayoutError(f"axes {axes} do not form a mesh of {world} ranks")
    names = {a: a.name for a in axes if a.name}
    steps = list(zip(bounds, bounds[1:]))[::-1]
    mesh_axes: list[tuple[str, int]] = []
    for i, (low, high) in enumerate(steps):
        name = names.get(Axis(low, high // low)) or f"axis{i}"
        if name in dict(mesh_axes):
            name = f"{name}.{i}"
        mesh_axes.append((name, high // low))
    where = {
        a: tuple(
            name
            for (low, high), (name, _) in zip(steps, mesh_axes)
            if a.stride <= low and high <= a.stride * a.size
        )
        for a in axes
    }
    return Mesh(tuple(mesh_axes)), where
