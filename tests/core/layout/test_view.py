"""Views against numpy: random chains of steps, cut by slicing arrays, put together by fragments.

The oracle carries arrays of element numbers through the steps: one array per rank, -1 for padding.
"""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.layout.view import View
from holdfast.errors import LayoutError
from holdfast.layout import tiles

MODERATE = settings(max_examples=300, deadline=None)


class Ranks:
    """Ranks made by steps so far: (view, what it stores as element numbers)."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        numbers = np.arange(prod(shape)).reshape(shape)
        self.ranks: list[tuple[View, np.ndarray]] = [(View.whole(shape), numbers)]

    def each(self, view, array) -> None:
        self.ranks = [(view(v), array(a)) for v, a in self.ranks]

    def cut(self, parts, view, array) -> None:
        """`view(v, part)` and the arrays `array(a)`, one for each part."""
        self.ranks = [
            (view(v, p), cut) for v, a in self.ranks for p, cut in zip(range(parts), array(a))
        ]

    @property
    def shape(self) -> tuple[int, ...]:
        """The first rank's shape."""
        return self.ranks[0][1].shape


def chunks(array: np.ndarray, parts: int, dim: int) -> list[np.ndarray]:
    """torch.chunk, with empty arrays where torch gives none."""
    step = -(-array.shape[dim] // parts)
    return [np.take(array, range(*slice(p * step, (p + 1) * step).indices(array.shape[dim])), dim)
            for p in range(parts)]  # fmt: skip


def composition(draw, total: int, parts: int) -> tuple[int, ...]:
    ends = sorted(draw(st.lists(st.integers(0, total), min_size=parts - 1, max_size=parts - 1)))
    return tuple(b - a for a, b in zip([0, *ends], [*ends, total]))


def shard(draw, r: Ranks, dim: int) -> None:
    parts = draw(st.integers(1, 4))
    if draw(st.booleans()):
        r.cut(parts, lambda v, p: v.shard(dim, p, parts), lambda a: chunks(a, parts, dim))
    else:
        r.cut(
            parts, lambda v, p: v.balanced(dim, p, parts), lambda a: np.array_split(a, parts, dim)
        )


def fused(draw, r: Ranks, dim: int) -> None:
    if len({a.shape[dim] for _, a in r.ranks}) > 1:
        return
    sizes = composition(draw, r.shape[dim], draw(st.integers(1, 4)))
    parts = draw(st.integers(1, 3))
    widths = [composition(draw, n, parts) for n in sizes]
    uneven = draw(st.booleans())

    def cut(a: np.ndarray) -> list[np.ndarray]:
        pieces = []
        for part, each in zip(np.split(a, np.cumsum(sizes)[:-1], dim), widths):
            ends = np.cumsum(each)[:-1]
            pieces.append(np.split(part, ends, dim) if uneven else chunks(part, parts, dim))
        return [np.concatenate([p[i] for p in pieces], dim) for i in range(parts)]

    def view(v: View, p: int) -> View:
        v = v.fused(dim, sizes)
        return v.split(dim, p, widths) if uneven else v.shard(dim, p, parts)

    r.cut(parts, view, cut)


def interleaved(draw, r: Ranks, dim: int) -> None:
    n = r.shape[dim]
    if not n or len({a.shape[dim] for _, a in r.ranks}) > 1:
        return
    groups = draw(st.sampled_from([g for g in range(1, n + 1) if n % g == 0]))
    sizes = composition(draw, n // groups, draw(st.integers(1, 3)))
    logical = draw(st.sampled_from(["parts", "stored"]))
    parts = draw(st.sampled_from([p for p in range(1, groups + 1) if groups % p == 0]))

    def array(a: np.ndarray) -> np.ndarray:
        if logical == "stored":
            return a
        by_part = np.split(a, np.cumsum(np.array(sizes) * groups)[:-1], dim)
        by_group = [np.split(part, groups, dim) for part in by_part]
        return np.concatenate([part[g] for g in range(groups) for part in by_group], dim)

    r.each(lambda v: v.interleaved(dim, groups, sizes, logical=logical), array)
    r.cut(parts, lambda v, p: v.shard(dim, p, parts), lambda a: chunks(a, parts, dim))


def padded(draw, r: Ranks, dim: int) -> None:
    multiple = draw(st.integers(1, 5))

    def array(a: np.ndarray) -> np.ndarray:
        widths = [(0, -a.shape[d] % multiple if d == dim else 0) for d in range(a.ndim)]
        return np.pad(a, widths, constant_values=-1)

    r.each(lambda v: v.padded(dim, multiple=multiple), array)


def transposed(draw, r: Ranks, dim: int) -> None:
    order = draw(st.permutations(range(len(r.shape))))
    r.each(lambda v: v.transposed(order), lambda a: a.transpose(order))


def flat(draw, r: Ranks) -> None:
    parts, multiple = draw(st.integers(1, 4)), draw(st.integers(1, 3))

    def array(a: np.ndarray) -> list[np.ndarray]:
        each = -(-a.size // (parts * multiple)) * multiple
        full = np.concatenate([a.reshape(-1), np.full(each * parts - a.size, -1)])
        return np.split(full, parts)

    r.cut(parts, lambda v, p: v.flat_shard(p, parts, multiple), array)


STEPS = (shard, shard, fused, interleaved, padded, transposed)
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 6, 8, 12]), max_size=3).map(tuple)


@st.composite
def chains(draw) -> tuple[tuple[int, ...], Ranks]:
    shape = draw(SHAPES)
    ranks = Ranks(shape)
    for _ in range(draw(st.integers(0, 3)) if shape else 0):
        if len(ranks.ranks) < 24:
            draw(st.sampled_from(STEPS))(draw, ranks, draw(st.integers(0, len(shape) - 1)))
    if draw(st.booleans()):
        flat(draw, ranks)
    return shape, ranks


@MODERATE
@given(chains())
def test_what_was_cut_is_put_together(chain) -> None:
    shape, ranks = chain
    base, result, boxes = 5, np.full(shape, -1), []
    for view, stored in ranks.ranks:
        assert view.stored == stored.shape and view.size == stored.size
        storage = np.concatenate([np.full(base, -7), stored.reshape(-1)])
        seen = 0
        for f in view.fragments(base):
            strides = [s * storage.itemsize for s in f.strides]
            source = np.lib.stride_tricks.as_strided(storage[f.offset :], f.box.shape, strides)
            result[f.box.within((0,) * len(shape))] = source
            boxes.append(f.box)
            seen += f.box.size
            f.stored()  # every fragment is of a row-major array: readable
        assert seen == np.count_nonzero(stored >= 0)
    assert tiles(boxes, shape)
    assert np.array_equal(result, np.arange(prod(shape)).reshape(shape))


@MODERATE
@given(SHAPES, st.data())
def test_flat_ranges_have_few_fragments(shape, data) -> None:
    start, stop = sorted(data.draw(st.integers(0, prod(shape) + 3)) for _ in range(2))
    view = View.whole(shape).flat(start, stop)
    assert len(view.fragments()) <= max(1, 2 * len(shape) - 1)
    a, b = sorted(data.draw(st.integers(0, stop - start)) for _ in range(2))
    again = View.whole(shape).flat(start + a, start + b)
    assert view.flat(a, b).fragments() == again.fragments()


def test_parts_of_one_element_are_one_fragment_each() -> None:
    """gpt-oss stores gate and up in turn: two strided fragments, not one per row."""
    view = View.whole((64, 8)).interleaved(0, 32, (1, 1)).shard(0, 1, 2)
    found = view.fragments()
    assert [str(f.box) for f in found] == ["16:32,0:8", "48:64,0:8"]
    assert [(f.offset, f.strides) for f in found] == [(0, (16, 1)), (8, (16, 1))]


def test_neighbours_are_merged() -> None:
    qkv = View.whole((48, 4)).fused(0, (16, 16, 16))
    assert len(qkv.fragments()) == 1
    assert len(qkv.shard(0, 0, 2).fragments()) == 3
    assert len(View.whole((48, 4)).interleaved(0, 1, (16, 16, 16)).fragments()) == 1
    assert len(View.whole((48, 4)).transposed().shard(0, 0, 2).fragments()) == 1


def test_ranges_may_be_picked_in_any_order() -> None:
    view = View.whole((12, 2)).picked(0, [(8, 10), (0, 4), (10, 12)])
    assert view.stored == (8, 2)
    assert [(str(f.box), f.offset) for f in view.fragments()] == [
        ("0:4,0:2", 4), ("8:10,0:2", 0), ("10:12,0:2", 12),
    ]  # fmt: skip


def test_scale_and_absence() -> None:
    view = View.whole((4,)).scaled(2).scaled(3)
    assert [f.scale for f in view.fragments()] == [6]
    assert view.absent().fragments() == [] and view.absent().size == 0


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (lambda v: v.shard(2, 0, 2), "there is no dim 2 in what is stored as (12, 5)"),
        (lambda v: v.shard(0, 2, 2), "there is no part 2 of 2"),
        (lambda v: v.shard(1, 0, 2, even=True), "5 does not divide into 2 equal parts"),
        (lambda v: v.experts(1, 0, 2), "5 does not divide into 2 equal parts"),
        (lambda v: v.picked(0, [(0, 13)]), "0:13 is no range of 12"),
        (lambda v: v.picked(0, [(0, 3), (2, 4)]), "[(0, 3), (2, 4)] overlap"),
        (lambda v: v.fused(0, (4, 4)), "fused parts 4 + 4 leave out 8:12"),
        (lambda v: v.fused(0, (16, -4)), "lengths are 0 or more"),
        (lambda v: v.split(0, 0, [(3, 3)]), "widths 3 + 3 leave out 6:12"),
        (lambda v: v.split(0, 0, [(6, 6), (1, 1)]), "widths of 2 parts given, there are 1"),
        (lambda v: v.interleaved(0, 3, (2, 1)), "3 groups of 6 + 3 leave out 9:12"),
        (lambda v: v.interleaved(0, 3, (2, 2)).shard(0, 0, 2), "0:6 cuts a group of 4"),
        (lambda v: v.fused(0, (6, 6)).padded(0, to=16), "a cut of it must come first"),
        (lambda v: v.padded(0, to=8), "12 is longer than 8"),
        (lambda v: v.padded(0, multiple=0), "must be 1 or more, not 0"),
        (lambda v: v.transposed((0, 0)), "(0, 0) is no order of 2 dims"),
        (lambda v: v.flat(0, 9).shard(0, 0, 2), "it has no dims"),
        (lambda v: v.flat(0, 9).flat(3, 10), "range 3:10 of a range of 9"),
        (lambda v: v.flat(3, 1), "3:1 is no range"),
        (lambda v: v.scaled(0), "is no value"),
    ],
)
def test_what_cannot_be_is_refused(steps, message) -> None:
    with pytest.raises(LayoutError) as error:
        steps(View.whole((12, 5)))
    assert message in str(error.value)
