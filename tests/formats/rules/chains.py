"""Random rules as text, and what each rank then stores, by slicing arrays of element numbers.

-1 is padding.  Nothing of holdfast computes the arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import numpy as np
from hypothesis import strategies as st

from holdfast.layout import Mesh

SHAPES = st.lists(st.sampled_from([1, 2, 3, 6, 8, 12]), max_size=3).map(tuple)


@dataclass
class Chain:
    """Steps so far: their text, and by rank what is stored (None: nothing)."""

    mesh: Mesh
    shape: tuple[int, ...]
    text: list[str] = field(default_factory=list)
    stored: list[np.ndarray | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        numbers = np.arange(prod(self.shape)).reshape(self.shape)
        self.stored = [numbers for _ in range(self.mesh.world)]

    def coordinates(self, rank: int) -> dict[str, int]:
        sizes = [n for _, n in self.mesh.axes]
        return dict(zip((a for a, _ in self.mesh.axes), map(int, np.unravel_index(rank, sizes))))

    def part(self, rank: int, axes: list[str]) -> int:
        at = self.coordinates(rank)
        sizes = [self.mesh.sizes[a] for a in axes]
        return int(np.ravel_multi_index([at[a] for a in axes], sizes))

    def parts(self, axes: list[str]) -> int:
        return prod(self.mesh.sizes[a] for a in axes)

    def each(self, change) -> None:
        """`change(array, rank)`."""
        self.stored = [None if a is None else change(a, r) for r, a in enumerate(self.stored)]

    @property
    def lengths(self) -> list[set[int]]:
        """By dim, over the ranks."""
        shapes = [a.shape for a in self.stored if a is not None]
        return [{s[d] for s in shapes} for d in range(len(self.shape))]

    @property
    def text_of_rule(self) -> str:
        return ", ".join(self.text)

    def counts(self, replicas: bool) -> np.ndarray:
        """How often each element is held; equal arrays count once if `replicas`."""
        held = [a for a in self.stored if a is not None]
        if replicas:
            held = list({(a.shape, a.tobytes()): a for a in held}.values())
        counts = np.zeros(prod(self.shape), int)
        for array in held:
            np.add.at(counts, array[array >= 0], 1)
        return counts.reshape(self.shape)


def chunks(array: np.ndarray, parts: int, dim: int) -> list[np.ndarray]:
    """torch.chunk, with empty arrays where torch gives none."""
    n = array.shape[dim]
    step = -(-n // parts)
    ends = [min(p * step, n) for p in range(1, parts)]
    return np.split(array, ends, dim)


def shard(draw, c: Chain, dim: int, axes: list[str]) -> None:
    parts, over = c.parts(axes), "*".join(axes)
    how = draw(st.sampled_from(["", " balanced"]))
    cut = np.array_split if how else chunks
    c.each(lambda a, r: cut(a, parts, dim)[c.part(r, axes)])
    c.text.append(f"shard {dim} over {over}{how}")


def fused(draw, c: Chain, dim: int, axes: list[str]) -> None:
    if len(c.lengths[dim]) != 1:
        return
    (n,) = c.lengths[dim]
    parts = c.parts(axes)
    ends = sorted(draw(st.lists(st.integers(0, n), max_size=2)))
    sizes = [b - a for a, b in zip([0, *ends], [*ends, n])]

    def cut(a: np.ndarray, rank: int) -> np.ndarray:
        pieces = [chunks(p, parts, dim)[c.part(rank, axes)] for p in np.split(a, ends, dim)]
        return np.concatenate(pieces, dim)

    c.each(cut)
    c.text.append(f"fused {dim} ({', '.join(map(str, sizes))}), shard {dim} over {'*'.join(axes)}")


def interleaved(draw, c: Chain, dim: int, axes: list[str]) -> None:
    parts = c.parts(axes)
    if len(c.lengths[dim]) != 1:
        return
    (n,) = c.lengths[dim]
    fitting = [g for g in range(1, n + 1) if n % g == 0 and g % parts == 0]
    if not fitting:
        return
    groups = draw(st.sampled_from(fitting))
    first = draw(st.integers(0, n // groups))
    sizes = [first, n // groups - first]

    def reorder(a: np.ndarray, rank: int) -> np.ndarray:
        by_part = np.split(a, [first * groups], dim)
        by_group = [np.split(p, groups, dim) for p in by_part]
        whole = np.concatenate([p[g] for g in range(groups) for p in by_group], dim)
        return chunks(whole, parts, dim)[c.part(rank, axes)]

    c.each(reorder)
    c.text.append(
        f"interleaved {dim} {groups} of ({sizes[0]}, {sizes[1]}), shard {dim} over {'*'.join(axes)}"
    )


def padded(draw, c: Chain, dim: int, axes: list[str]) -> None:
    multiple = draw(st.integers(1, 5))

    def pad(a: np.ndarray, rank: int) -> np.ndarray:
        widths = [(0, -a.shape[d] % multiple if d == dim else 0) for d in range(a.ndim)]
        return np.pad(a, widths, constant_values=-1)

    c.each(pad)
    c.text.append(f"padded {dim} multiple {multiple}")
    shard(draw, c, dim, axes)


def transposed(draw, c: Chain, dim: int, axes: list[str]) -> None:
    order = draw(st.permutations(range(len(c.shape))))
    c.each(lambda a, r: a.transpose(order))
    c.text.append(f"transposed ({', '.join(map(str, order))})")
    shard(draw, c, dim, axes)


def flat(draw, c: Chain, axes: list[str]) -> None:
    parts, multiple = c.parts(axes), draw(st.integers(1, 3))

    def cut(a: np.ndarray, rank: int) -> np.ndarray:
        each = -(-a.size // (parts * multiple)) * multiple
        full = np.concatenate([a.reshape(-1), np.full(each * parts - a.size, -1)])
        return np.split(full, parts)[c.part(rank, axes)]

    c.each(cut)
    c.text.append(f"flat over {'*'.join(axes)} multiple {multiple}")


def on(draw, c: Chain, axis: str) -> None:
    size = c.mesh.sizes[axis]
    chosen = draw(st.sets(st.integers(0, size - 1), min_size=1))
    c.stored = [a if c.part(r, [axis]) in chosen else None for r, a in enumerate(c.stored)]
    c.text.append(f"on {axis} ({', '.join(map(str, sorted(chosen)))})")


@st.composite
def chains(draw, *, distinct: bool = True) -> Chain:
    """`distinct`: no axis is used twice, and none restricted; so every element is held once."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    c = Chain(Mesh(tuple((f"a{i}", n) for i, n in enumerate(sizes))), draw(SHAPES))
    free = draw(st.permutations([a for a, _ in c.mesh.axes]))
    for _ in range(draw(st.integers(0, 3)) if c.shape else 0):
        if not free:
            break
        axes = list(free[: draw(st.integers(1, min(2, len(free))))])
        if distinct:
            free = free[len(axes) :]
        if not distinct and draw(st.integers(0, 2)) == 0:
            on(draw, c, axes[0])
            continue
        step = draw(st.sampled_from([shard, fused, interleaved, padded, transposed]))
        step(draw, c, draw(st.integers(0, len(c.shape) - 1)), axes)
    if free and draw(st.booleans()):
        flat(draw, c, [free[0]])
    return c
