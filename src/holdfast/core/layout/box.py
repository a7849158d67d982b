"""Boxes: half-open hyper-rectangles of a logical tensor.

A `Box` says which elements are meant, never where they are stored.  Everything that holds part of a
tensor (a rank's shard, a piece of a file, a range that a reader asks for) names its part by a box,
and resharding is the intersection of boxes.

    >>> Box((0, 2), (4, 6)) & Box((2, 0), (8, 4))
    Box(start=(2, 2), stop=(4, 4))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import prod
from operator import sub

import msgspec


class Box(msgspec.Struct, frozen=True, gc=False):
    """`start[d] <= index[d] < stop[d]` for every dim d; a 0-dim tensor is `Box((), ())`."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sub, self.stop, self.start))

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(map(sub, self.stop, self.start))

    def __and__(self, other: Box) -> Box | None:
        """The common part, None if there is none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop)) else None

    def within(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """Slices that pick this box out of an array whose element 0 lies at `origin`."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, origin))

    def __str__(self) -> str:
        return ",".join(f"{a}:{b}" for a, b in zip(self.start, self.stop))


def box_at(start: tuple[int, ...], shape: Sequence[int]) -> Box:
    """The box of a shape that begins at `start`."""
    return Box(start, tuple(a + n for a, n in zip(start, shape)))


def moved(box: Box, by: tuple[int, ...]) -> Box:
    """A box as far away as `by` says, dim by dim."""
    start, stop = (tuple(a + n for a, n in zip(side, by)) for side in (box.start, box.stop))
    return Box(start, stop)


def is_inside(box: Box, shape: tuple[int, ...]) -> bool:
    """True if it is a box of a tensor of that shape; for boxes from files."""
    return len(box.start) == len(box.stop) == len(shape) and all(
        0 <= a <= b <= n for a, b, n in zip(box.start, box.stop, shape)
    )


def whole(shape: tuple[int, ...]) -> Box:
    """The box of all elements of a tensor of that shape."""
    return _whole(tuple(shape))


@lru_cache(4096)
def _whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous array of that shape."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def is_row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True if an array of these strides is contiguous; those of dims of length 1 do not matter."""
    expected = 1
    for n, stride in zip(reversed(shape), reversed(strides)):
        if n != 1 and stride != expected:
            return False
        expected *= n
    return True


def flat_range(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The boxes that make up elements `start..stop` of a row-major array, in order.

    At most `2 * ndim - 1` boxes: partial rows at both ends of each dim and one block between.
    """
    if not shape:
        return [Box((), ())] if start < stop else []
    strides = row_major(shape)
    boxes: list[Box] = []

    def cover(prefix: tuple[int, ...], begin: int, end: int) -> None:
        if begin >= end:
            return
        dim = len(prefix)
        if dim == len(shape):
            boxes.append(Box(prefix, tuple(i + 1 for i in prefix)))
            return
        base = sum(i * s for i, s in zip(prefix, strides))
        unit = strides[dim]
        first, last = -(-(begin - base) // unit), (end - base) // unit
        if first > last:  # both ends fall inside one row
            cover((*prefix, last), begin, end)
            return
        cover((*prefix, first - 1), begin, base + first * unit)
        if first < last:
            tail = shape[dim + 1 :]
            ones = tuple(i + 1 for i in prefix)
            boxes.append(Box((*prefix, first, *(0 for _ in tail)), (*ones, last, *tail)))
        cover((*prefix, last), base + last * unit, end)

    cover((), start, stop)
    return boxes


def _cut_dims(boxes: Sequence[Box], shape: tuple[int, ...]) -> list[int]:
    """Dims along which some box is not as long as the whole."""
    return [d for d, n in enumerate(shape) if any(b.start[d] or b.stop[d] != n for b in boxes)]


def num_corners(boxes: Sequence[Box], shape: tuple[int, ...]) -> int:
    """Number of corners that `tiles` has to count."""
    return len(boxes) << len(_cut_dims(boxes, shape))


def tiles(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """True if boxes inside `shape` hold every element exactly once.

    A box's indicator is determined by its corners, each signed by the number of its stops (its mixed
    difference).  So boxes sum to the whole if and only if their signed corners do: no pairs are tried.
    """
    dims = _cut_dims(boxes, shape)
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, some in (
        (1, [b for b in boxes if b.size]),
        (-1, [whole(shape)] if prod(shape) else []),
    ):
        for box in some:
            for stops in product((0, 1), repeat=len(dims)):
                at = tuple(box.stop[d] if s else box.start[d] for d, s in zip(dims, stops))
                corners[at] += -sign if sum(stops) % 2 else sign
    return not any(corners.values())
