"""Boxes and flat ranges."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from core.layout.strategies import boxes_in, listed, shapes
from holdfast.layout import Box, Mesh, flat_range, row_major, tiles, whole

MODERATE = settings(max_examples=80, deadline=None)
SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@MODERATE
@given(SHAPES, st.data())
def test_flat_range_is_the_range_in_order_and_short(shape, data) -> None:
    start, stop = sorted(data.draw(st.lists(st.integers(0, prod(shape)), min_size=2, max_size=2)))
    index = np.arange(prod(shape)).reshape(shape)
    boxes = flat_range(shape, start, stop)
    got = [i for box in boxes for i in index[box.within((0,) * len(shape))].reshape(-1)]
    assert got == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@MODERATE
@given(shapes(), st.data())
def test_intersection_is_what_both_hold(shape, data) -> None:
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))

    def mask(box: Box) -> np.ndarray:
        found = np.zeros(shape, bool)
        found[box.within((0,) * len(shape))] = True
        return found

    common, both = a & b, mask(a) & mask(b)
    assert (common is not None) == bool(both.any())
    if common is not None:
        assert (mask(common) == both).all()


@MODERATE
@given(shapes(), st.data())
def test_tiles_is_what_counting_says(shape, data) -> None:
    parts = data.draw(listed(Mesh((("r", 4),)), shape)).held or ()
    boxes = [box for _, box in parts]
    if data.draw(st.booleans()):
        boxes += data.draw(st.lists(boxes_in(shape), max_size=2))
    if boxes and data.draw(st.booleans()):
        boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
    count = np.zeros(shape, int)
    for box in boxes:
        count[box.within((0,) * len(shape))] += 1
    assert tiles(boxes, shape) == bool((count == 1).all())


def test_tiles_takes_many_parallel_fragments() -> None:
    boxes = [Box((0, i), (8, i + 1)) for i in range(20_000)]
    assert tiles(boxes, (8, 20_000))
    assert not tiles([*boxes, boxes[7]], (8, 20_000))


@MODERATE
@given(st.lists(st.integers(0, 5), max_size=4).map(tuple))
def test_row_major_is_numpy_s(shape) -> None:
    assert whole(shape).size == prod(shape)
    if prod(shape):
        strides = np.zeros(shape, np.int8).strides
        assert all(a == b for a, b, n in zip(row_major(shape), strides, shape) if n > 1)
