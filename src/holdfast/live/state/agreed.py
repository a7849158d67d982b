"""Merging each rank's description of what it holds into one manifest.

A rank describes its tensors by constructor (name, dtype, shape, cuts over axes), never by derived values
such as its box, so ranks of one kind give byte-identical descriptions: they are exchanged by digest, and
only distinct ones travel (one per pipeline stage, say).  `merge_descriptions` finds the common mesh, which
ranks hold which tensor, and the few irregular tensors that must be listed rank by rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from holdfast.base.errors import LayoutError
from holdfast.base.wire import decode_msgpack
from holdfast.core.format.manifest import ShardingEntry, TensorEntry, from_sharding
from holdfast.core.layout import Axis, Box, Cut, Mesh, Sharding, chunk, common_mesh, tiles, whole
from holdfast.live.state.named import Collected
from holdfast.live.state.placed import dtype_name

# of replicas, which are sampled to be compared (`live.state.replica_sampling`)
Class = tuple[int, int, bool]
"""(number of a sharding, part, whether they are buffers): what is compared in one digest first."""
SampleRow = tuple[int, int, int]
"""(tensor number, part, digest)"""
Sample = tuple[int, dict[Class, int]]
"""(number of the round, digests by class)"""


class Described(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor: `cuts` as (dim, stride, size, axis name), or the rank's `boxes` if irregular."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    state: str
    cuts: tuple[tuple[int, int, int, str | None], ...] | None
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


class Description(msgspec.Struct, frozen=True, array_like=True):
    """All tensors of a rank."""

    tensors: tuple[Described, ...]
    aliases: dict[str, str]


class Agreement(msgspec.Struct, frozen=True):
    """The parts of a manifest that all ranks hold together, and that stay the same at each save."""

    mesh: tuple[tuple[str, int], ...]
    shardings: tuple[ShardingEntry, ...]
    tensors: tuple[TensorEntry, ...]
    aliases: dict[str, str]


def describe_tensors(live: Collected) -> bytes:
    """This rank's description, canonical."""
    rows = []
    for t in live.tensors.values():
        p = t.placed
        cuts: Any = p.cuts
        boxes: Any = ()
        if cuts is None:
            boxes = tuple((part.box.start, part.box.stop) for part in t.parts)
        elif cuts:
            cuts = tuple((d, a.stride, a.size, a.name) for d, a in cuts if a.size > 1)
        rows.append(Described(t.name, dtype_name(p.local.dtype), p.shape, t.state, cuts, boxes))
    return msgspec.msgpack.encode(Description(tuple(rows), live.aliases))


def merge_descriptions(
    descriptions: list[bytes], of_rank: list[int], known: Mesh | None = None
) -> Agreement:
    """One agreement from distinct descriptions; rank r gave `descriptions[of_rank[r]]`."""
    docs = [decode_msgpack(d, Description) for d in descriptions]
    world = len(of_rank)
    ranks = [[r for r, d in enumerate(of_rank) if d == i] for i in range(len(docs))]
    found: dict[str, list[tuple[int, Described]]] = {}
    aliases: dict[str, str] = {}
    for i, doc in enumerate(docs):
        aliases |= doc.aliases
        for t in doc.tensors:
            found.setdefault(t.name, []).append((i, t))
    mesh, where = _mesh(docs, world, known)
    builder = _Shardings(mesh, where, ranks)
    tensors = []
    for name, given in found.items():
        t = given[0][1]
        if len(given) > 1:
            _same(name, given, ranks)
        sharding = builder.of(given)
        tensors.append(TensorEntry(name, t.dtype, t.shape, sharding, t.state))
    aliases = {a: n for a, n in aliases.items() if a not in found}
    entries = tuple(from_sharding(s) for s in builder.index)
    return Agreement(mesh.axes, entries, tuple(tensors), aliases)


def _mesh(
    docs: list[Description], world: int, known: Mesh | None
) -> tuple[Mesh, dict[Axis, tuple[str, ...]] | None]:
    axes = {
        Axis(stride, size): Axis(stride, size, name)
        for doc in docs
        for t in doc.tensors
        for _, stride, size, name in t.cuts or ()
    }
    if known is not None:
        for name, size in known.axes:
            axes[Axis(known.strides[name], size)] = Axis(known.strides[name], size, name)
    try:
        return common_mesh(axes.values(), world)
    except LayoutError:
        return Mesh((("rank", world),)), None


def _same(name: str, given: list[tuple[int, Described]], ranks: list[list[int]]) -> None:
    first = given[0][1]
    for i, t in given[1:]:
        if (t.dtype, t.shape) != (first.dtype, first.shape):
            raise LayoutError(
                f"{name!r} is {first.dtype} {first.shape} on rank {ranks[given[0][0]][0]} "
                f"but {t.dtype} {t.shape} on rank {ranks[i][0]}",
                hint="tensors that differ between ranks need names of their own",
            )


class _Shardings:
    """Distinct shardings, numbered as they come."""

    def __init__(
        self, mesh: Mesh, where: dict[Axis, tuple[str, ...]] | None, ranks: list[list[int]]
    ) -> None:
        self.mesh = mesh
        self.where = where
        self.ranks = ranks
        self.index: dict[Sharding, int] = {}
        self._alike: dict[tuple[Any, ...], int] = {}
        """Numbers of regular shardings, by all that tells them apart."""
        self._on: dict[tuple[int, ...], tuple[tuple[str, tuple[int, ...]], ...] | None] = {}

    def of(self, given: list[tuple[int, Described]]) -> int:
        alike = tuple([(i, t.cuts, t.state == "buffer") for i, t in given])
        number = self._alike.get(alike)
        if number is None:
            regular = self._of_first(given) or self._regular(given)
            sharding = regular or self._listed(given)
            number = self.index.setdefault(sharding, len(self.index))
            if regular is not None:
                self._alike[alike] = number
        return number

    def _of_first(self, given: list[tuple[int, Described]]) -> Sharding | None:
        """Whole buffers are the first holder's alone: replicas of them may differ, and DDP sends those of
        the first rank to the others."""
        if any(t.state != "buffer" or t.cuts != () for _, t in given) or self.mesh.world == 1:
            return None
        first = min(self.ranks[i][0] for i, _ in given)
        at = [(axis, self.mesh.coordinate(first, axis)) for axis, n in self.mesh.axes if n > 1]
        return Sharding((), tuple((axis, (where,)) for axis, where in at))

    def _regular(self, given: list[tuple[int, Described]]) -> Sharding | None:
        first = given[0][1]
        if self.where is None and first.cuts != ():
            return None
        if first.cuts is None or any(t.cuts != first.cuts for _, t in given):
            return None
        holders = tuple(i for i, _ in given)
        if holders not in self._on:
            self._on[holders] = product(self.mesh, [r for i in holders for r in self.ranks[i]])
        on = self._on[holders]
        cuts = self._cuts(first.cuts)
        if on is None or {a for c in cuts for a in c.axes} & {a for a, _ in on}:
            return None
        return Sharding(cuts, on)

    def _listed(self, given: list[tuple[int, Described]]) -> Sharding:
        """Every distinct box once, written by the holder that has the least so far."""
        holders: dict[Box, list[int]] = {}
        for i, t in given:
            for rank in self.ranks[i]:
                for box in self._boxes(t, rank):
                    if box.size:
                        holders.setdefault(box, []).append(rank)
        load: dict[int, int] = {}
        held = []
        for box, ranks in sorted(holders.items(), key=lambda kv: (kv[0].start, kv[0].stop)):
            rank = min(ranks, key=lambda r: (load.get(r, 0), r))
            load[rank] = load.get(rank, 0) + box.size
            held.append((rank, box))
        if not tiles(list(holders), given[0][1].shape):
            raise LayoutError(
                f"{given[0][1].name!r}: what the ranks hold overlaps or leaves holes",
                hint="tensors that differ between ranks need names of their own",
            )
        return Sharding(held=tuple(held))

    def _boxes(self, t: Described, rank: int) -> list[Box]:
        if t.cuts is None:
            return [Box(*box) for box in t.boxes]
        box = whole(t.shape)
        for dim, stride, size, _ in t.cuts:  # the axes may form no mesh
            box = chunk(box, dim, rank // stride % size, size)
        return [box]

    def _cuts(self, described: Iterable[tuple[int, int, int, str | None]]) -> tuple[Cut, ...]:
        """Cuts of a tensor over the axes of the mesh, from what a rank has described."""
        where = self.where or {}
        return tuple(Cut(dim, where[Axis(stride, size)]) for dim, stride, size, _ in described)


def product(mesh: Mesh, ranks: Iterable[int]) -> tuple[tuple[str, tuple[int, ...]], ...] | None:
    """Ranks as coordinates per axis, stated where not all; None if they are no such product."""
    ranks = set(ranks)
    on, count = [], 1
    for axis, size in mesh.axes:
        coords = tuple(sorted({mesh.coordinate(r, axis) for r in ranks}))
        count *= len(coords)
        if len(coords) < size:
            on.append((axis, coords))
    return tuple(on) if count == len(ranks) else None
