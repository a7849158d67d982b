"""Fragments: where the elements of a box lie in a flat storage.

Storages are what others have written: a rank's tensor, a flat buffer, a file.  A fragment is a box of the
logical tensor and, for each of its dims, how far apart neighbours are in the storage.  That covers dense
arrays, slices of wider ones, and transposed ones:

    >>> Fragment(Box((0, 2), (4, 4)), 0, (1, 4)).stored().order      # columns 2..4, stored transposed
    (1, 0)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.base.errors import LayoutError
from holdfast.core.layout.box import Box, box_at, flat_range, is_row_major, moved, row_major


@dataclass(frozen=True, slots=True)
class Stored:
    """A fragment as part of a row-major array whose element 0 is the fragment's first.

    Dim k of the array is dim `order[k]` of the tensor; an order shorter than the array's shape leaves out a
    last dim of which the fragment has index 0 alone (a column of a matrix).
    """

    order: tuple[int, ...]
    shape: tuple[int, ...]

    def box(self, logical: Box) -> Box:
        """A box of the tensor in the array's order; its last dim is 0..1 where `order` leaves one out."""
        more = len(self.shape) - len(self.order)
        start = tuple(logical.start[d] for d in self.order) + (0,) * more
        return Box(start, tuple(logical.stop[d] for d in self.order) + (1,) * more)

    def piece(self, box: Box) -> Box:
        """The whole array, by coordinates in which the fragment (`box` of the tensor) begins."""
        return box_at(self.box(box).start, self.shape)

    def places(self) -> tuple[int, ...]:
        """For every dim of the tensor, which dim of the array it is."""
        return tuple(sorted(range(len(self.order)), key=self.order.__getitem__))


@dataclass(frozen=True, slots=True)
class Fragment:
    """`box` of a tensor lies at `offset` of a storage, dim d in steps of `strides[d]`, both in elements.

    A value is the stored number times `scale`.
    """

    box: Box
    offset: int
    strides: tuple[int, ...]
    scale: float = 1.0

    @staticmethod
    def dense(box: Box, offset: int = 0) -> Fragment:
        """A contiguous, row-major fragment."""
        return Fragment(box, offset, row_major(box.shape))

    @property
    def is_dense(self) -> bool:
        return is_row_major(self.box.shape, self.strides)

    @property
    def span(self) -> int:
        """Elements of the storage from the first to the last."""
        if not self.box.size:
            return 0
        return sum((n - 1) * s for n, s in zip(self.box.shape, self.strides)) + 1

    def stored(self) -> Stored:
        """The row-major array that the fragment is part of.

        LayoutError if there is none: strides that are 0, negative, or do not divide each other.
        """
        shape = self.box.shape
        flat = [d for d, n in enumerate(shape) if n == 1]
        real = sorted((d for d, n in enumerate(shape) if n != 1), key=lambda d: -self.strides[d])
        widths, unit = [1] * len(flat), 1
        for above, d in zip([None, *real], real):
            wide, stride = self.strides[above] if above is not None else 0, self.strides[d]
            nests = stride > 0 and (above is None or wide % stride == 0)
            if not nests or (above is not None and shape[d] * stride > wide):
                raise LayoutError(f"strides {self.strides} of shape {shape} are of no array")
            widths.append(shape[d] if above is None else wide // stride)
            unit = stride
        return Stored((*flat, *real), (*widths, *([unit] if unit != 1 else [])))


def flat_fragments(box: Box, start: int, stop: int, offset: int) -> Iterator[Fragment]:
    """Elements `start..stop` of `box`, row-major, that lie back to back from `offset` on."""
    for piece in flat_range(box.shape, start, stop):
        yield Fragment.dense(moved(piece, box.start), offset)
        offset += piece.size
