"""Forecast of the reads of a restore on another mesh.

The model's sharding plan on that mesh is unknown, so each of its axes gets an assumed meaning, which is
stated:

* an axis of the saved mesh: tensors are cut over it as they were saved;
* another axis with a data-parallel name (`dp`, `fsdp`, ...): every tensor is cut along dim 0 over it,
  after all other cuts;
* any other axis: every rank along it reads the same.

A rank then wants a box per tensor, and `Placement.locate` gives the files that hold it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.base.errors import UsageError
from holdfast.core.format.manifest import Manifest
from holdfast.core.layout import Cut, Mesh, Sharding, part_of, parts_of
from holdfast.core.layout.pieces import Ints, Table

_SHARDED = (
    "dp", "fsdp", "shard", "dp_shard", "dp_shard_cp", "data", "zero", "edp", "world", "rank",
)  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """The bytes that one rank wants, by file (rank of the file -> bytes) and by state."""

    rank: int
    num_tensors: int
    wanted_bytes: int
    by_file: dict[int, int]
    by_state: dict[str, int]
    file_bytes: int
    """Total length of these files."""


_MAX_DIGITS = 8
"""Most digits of an axis's size."""


def parse_mesh(text: str) -> Mesh:
    """Parse `dp=4,tp=2`, axes from the outermost to the innermost.  UsageError."""
    axes = []
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        fits = size.isascii() and size.isdigit() and 0 < len(size.lstrip("0")) <= _MAX_DIGITS
        if not name or not fits:
            raise UsageError(
                f"--mesh {text}: {part.strip()!r} is not an axis", hint="write it as dp=4,tp=2"
            )
        axes.append((name, int(size)))
    mesh = Mesh(tuple(axes))
    if len(mesh.sizes) != len(axes):
        raise UsageError(f"--mesh {text}: an axis is named twice")
    return mesh


def is_data_parallel(axis: str) -> bool:
    return axis.lower().rstrip("0123456789") in _SHARDED


@dataclass(frozen=True)
class Reshape:
    """A restore of `manifest` on `mesh`; `assumed`: the meaning of each axis in words."""

    manifest: Manifest
    mesh: Mesh
    shardings: tuple[Sharding, ...]
    assumed: tuple[tuple[str, str], ...]

    @staticmethod
    def onto(manifest: Manifest, mesh: Mesh) -> Reshape:
        """Plan a restore: one new sharding for each saved one, by the assumptions."""
        saved = manifest.layout.sizes
        new_dp = tuple(a for a in mesh.sizes if a not in saved and is_data_parallel(a))
        old = manifest.placement.table.shardings
        shardings = tuple(_onto(s, mesh, saved, new_dp) for s in old)
        return Reshape(manifest, mesh, shardings, tuple(_assumed(manifest, mesh, new_dp)))

    @property
    def table(self) -> Table:
        return self.manifest.placement.table

    def boxes(self, rank: int) -> tuple[Ints, Ints]:
        """Boxes that a rank wants: padded starts and stops, a row per tensor; empty boxes for none."""
        stop = self.table.shape.copy()
        start = np.zeros_like(stop)
        for number, sharding in enumerate(self.shardings):
            rows = np.flatnonzero(self.table.sharding == number)
            if any(self.mesh.coordinate(rank, a) not in coords for a, coords in sharding.on):
                stop[rows] = 0
                continue
            for cut in sharding.cuts:
                part, parts = part_of(self.mesh, rank, cut.axes), parts_of(self.mesh, cut.axes)
                mine = rows[self.table.ndim[rows] > cut.dim]
                lo, hi = start[mine, cut.dim], stop[mine, cut.dim]
                step = -(-(hi - lo) // parts)
                start[mine, cut.dim] = np.minimum(lo + part * step, hi)
                stop[mine, cut.dim] = np.minimum(lo + (part + 1) * step, hi)
        return start, stop

    def holdings(self) -> list[int]:
        """A number per rank, equal for ranks that want the same parts of all tensors."""
        largest = [
            int(self.table.ndim[self.table.sharding == i].max(initial=-1))
            for i in range(len(self.shardings))
        ]
        used = [(s, most) for s, most in zip(self.shardings, largest) if most >= 0]
        wanted = [
            tuple(_part(self.mesh, rank, s, most) for s, most in used)
            for rank in range(self.mesh.world)
        ]
        numbers = {one: i for i, one in enumerate(dict.fromkeys(wanted))}
        return [numbers[one] for one in wanted]

    def reading(self, rank: int) -> Reading:
        """The reads of one rank.  UsageError if the mesh has no such rank."""
        if not 0 <= rank < self.mesh.world:
            raise UsageError(f"rank {rank} is not in 0..{self.mesh.world - 1} of mesh {self.mesh}")
        start, stop = self.boxes(rank)
        tensors = np.arange(len(self.table.names))
        placement = self.manifest.placement.fresh()
        found = placement.locate(tensors, start, stop)
        size = np.prod(found.stop - found.start, axis=1) * self.table.itemsize[found.want]
        by_file = _sums(found.rank, size)
        states = np.array([t.state for t in self.manifest.tensors])[found.want]
        return Reading(
            rank,
            len(np.unique(found.want)),
            int(size.sum()),
            dict(by_file),
            dict(_sums(states, size)),
            sum(self.manifest.file_of[r].bytes for r, _ in by_file),
        )


def _part(mesh: Mesh, rank: int, sharding: Sharding, ndim: int) -> tuple[int, ...] | None:
    """A rank's part per cut, for tensors of up to `ndim` dims; None if it holds none."""
    if any(mesh.coordinate(rank, a) not in coords for a, coords in sharding.on):
        return None
    return tuple(part_of(mesh, rank, cut.axes) for cut in sharding.cuts if cut.dim < ndim)


def _sums(keys: NDArray[Any], size: Ints) -> list[tuple[Any, int]]:
    """(key, sum of its sizes), by key."""
    names, index = np.unique(keys, return_inverse=True)
    sums = np.zeros(len(names), np.int64)
    np.add.at(sums, index.reshape(-1), size)
    return list(zip(names.tolist(), sums.tolist()))


def _onto(saved: Sharding, mesh: Mesh, sizes: dict[str, int], new_dp: tuple[str, ...]) -> Sharding:
    cuts = []
    for cut in saved.cuts:
        axes = tuple(a for a in cut.axes if a in mesh.sizes)
        if axes:
            cuts.append(Cut(cut.dim, axes))
    dp = new_dp
    if saved.held is not None:  # an irregular layout: no cuts to carry over
        dp = tuple(a for a in mesh.sizes if a in new_dp or (a in sizes and is_data_parallel(a)))
    if dp:
        cuts.append(Cut(0, dp))
    on = []
    for axis, coords in saved.on:
        if axis in mesh.sizes:
            new = sorted({c * mesh.sizes[axis] // sizes[axis] for c in coords})
            on.append((axis, tuple(new)))
    return Sharding(tuple(cuts), tuple(on))


def _assumed(manifest: Manifest, mesh: Mesh, new_dp: tuple[str, ...]) -> list[tuple[str, str]]:
    saved = manifest.layout.sizes
    cut = {a for s in manifest.shardings for c in s.cuts for a in c.axes}
    staged = {a for s in manifest.shardings for a in s.on}
    rows = []
    for axis, size in mesh.axes:
        if axis in saved:
            was = (
                f"{saved[axis]} ranks then, {size} now" if saved[axis] != size else f"{size} ranks"
            )
            how = (
                "cut"
                if axis in cut
                else "stages regrouped in order"
                if axis in staged
                else "replicas"
            )
            rows.append((axis, f"as saved: {how} ({was})"))
        elif axis in new_dp:
            rows.append(
                (axis, "not in the saved mesh: every tensor cut along dim 0 (a guess by name)")
            )
        else:
            rows.append(
                (axis, "not in the saved mesh: every rank along it reads the same (a guess)")
            )
    for axis, size in manifest.mesh:
        if axis not in mesh.sizes and (axis in cut or axis in staged):
            rows.append((axis, f"gone: what {size} ranks shared, each rank now reads whole"))
    if any(s.held is not None for s in manifest.shardings):
        rows.append(("(listed)", "irregular tensors: cut along dim 0 over data-parallel axes"))
    return rows


def total_tensor_bytes(reshape: Reshape) -> int:
    """Bytes of all tensors, once."""
    table = reshape.table
    return sum(math.prod(s) * int(i) for s, i in zip(table.shape.tolist(), table.itemsize))
