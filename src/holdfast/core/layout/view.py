"""Views: how the tensor that a rank stores relates to the logical tensor.

Parallel frameworks cut, fuse, interleave, pad and transpose.  A `View` starts as the whole tensor, and each
constructor, applied from left to right, makes another view out of one:

    >>> qkv = View.whole((24, 8)).fused(0, (16, 4, 4))      # grouped queries: q, k and v differ
    >>> view = qkv.shard(0, 1, 2)                           # rank 1 of 2: a part of each
    >>> view.stored
    (12, 8)
    >>> [(str(f.box), f.offset) for f in view.fragments()]
    [('8:16,0:8', 0), ('18:20,0:8', 64), ('22:24,0:8', 80)]

A `dim` is a dim of the tensor as the step finds it: behind `transposed`, dim 0 is what was the last.  Every
constructor but `flat` treats each dim by itself, so a view is one `StoredDim` per dim, and
its fragments are their product: never a list of elements, however large the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import isfinite, prod

from holdfast.base.errors import LayoutError
from holdfast.core.layout.box import Box, flat_range, row_major, whole
from holdfast.core.layout.fragment import Fragment
from holdfast.core.layout.stored_dim import Move, Run, StoredDim

_MAX_RUNS = 1 << 20
"""Most runs of a dim."""

_Widths = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class View:
    """A rank's stored tensor: its dims as stored; perhaps a range of it, flattened; perhaps scaled.

    `is_here` is False for a rank that has no part in the tensor.
    """

    shape: tuple[int, ...]
    dims: tuple[StoredDim, ...]
    scale: float = 1.0
    window: tuple[int, int] | None = None
    is_here: bool = True

    @staticmethod
    def whole(shape: Sequence[int]) -> View:
        """All of a tensor of that shape, as it is."""
        if any(n < 0 for n in shape):
            raise LayoutError(f"no tensor has the shape {tuple(shape)}")
        return View(tuple(shape), tuple(StoredDim.whole(d, n) for d, n in enumerate(shape)))

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of what is stored."""
        if not self.is_here:
            return (0,)
        if self.window is not None:
            return (self.window[1] - self.window[0],)
        return tuple(d.length for d in self.dims)

    @property
    def size(self) -> int:
        """Number of elements stored, padding included."""
        return prod(self.stored)

    # -- cuts -------------------------------------------------------------------------------------

    def shard(self, dim: int, part: int, parts: int, *, even: bool = False) -> View:
        """Part `part` of `parts` of a dim, as torch.chunk cuts: the last parts may be shorter or empty.

        Behind `fused` each fused part is cut by itself.  `even`: LayoutError if a length does not divide.
        Two shards of one dim are torch's _StridedShard.
        """
        _check_part(part, parts)
        stored_dim = self._stored_dim(dim)
        widths = []
        for length in stored_dim.parts or (stored_dim.length,):
            if even and length % parts:
                raise LayoutError(f"dim {dim}: {length} does not divide into {parts} equal parts")
            step = -(-length // parts)
            ends = [min(i * step, length) for i in range(part, part + 2)]
            widths.append((ends[0], ends[1]))
        return self._cut(dim, stored_dim, widths)

    def balanced(self, dim: int, part: int, parts: int) -> View:
        """Like `shard`, but parts differ by 1 at most, the longer first (numpy.array_split)."""
        _check_part(part, parts)
        stored_dim = self._stored_dim(dim)
        ends = []
        for length in stored_dim.parts or (stored_dim.length,):
            small, more = divmod(length, parts)
            ends.append((part * small + min(part, more), (part + 1) * small + min(part + 1, more)))
        return self._cut(dim, stored_dim, ends)

    def split(self, dim: int, part: int, widths: _Widths) -> View:
        """Like `shard`, with widths of all parts: a list per fused part, or one for the whole."""
        stored_dim = self._stored_dim(dim)
        lengths = stored_dim.parts or (stored_dim.length,)
        if len(widths) != len(lengths):
            raise LayoutError(
                f"dim {dim}: widths of {len(widths)} parts given, there are {len(lengths)}"
            )
        ends = []
        for length, each in zip(lengths, widths):
            _check_part(part, len(each))
            _check_sum(dim, "widths", each, length)
            before = sum(each[:part])
            ends.append((before, before + each[part]))
        return self._cut(dim, stored_dim, ends)

    def picked(self, dim: int, ranges: Sequence[tuple[int, int]]) -> View:
        """Ranges of a dim, stored one after the other: for layouts that are listed and follow no rule."""
        stored_dim = self._plain(dim)
        for start, stop in ranges:
            if not 0 <= start <= stop <= stored_dim.length:
                raise LayoutError(f"dim {dim}: {start}:{stop} is no range of {stored_dim.length}")
        ordered = sorted(r for r in ranges if r[0] < r[1])
        if any(a[1] > b[0] for a, b in zip(ordered, ordered[1:])):
            raise LayoutError(f"dim {dim}: ranges {list(ranges)[:16]} overlap")
        return self._with(dim, stored_dim.kept(ranges))

    def experts(self, dim: int, part: int, parts: int) -> View:
        """The experts of rank `part`, where `dim` counts experts.  LayoutError if they do not divide."""
        return self.shard(dim, part, parts, even=True)

    def absent(self) -> View:
        """Nothing, for a rank that has no part in the tensor (another stage, another's expert)."""
        return replace(self, is_here=False)

    def flat(self, start: int, stop: int) -> View:
        """Elements `start..stop` of what is stored, flattened; what lies beyond its end is padding.

        For a range of ZeRO's flat buffers.  At most `2 * ndim - 1` fragments where there was one.
        """
        if not 0 <= start <= stop:
            raise LayoutError(f"{start}:{stop} is no range")
        if self.window is None:
            return replace(self, window=(start, stop))
        first, last = self.window
        if stop > last - first:
            raise LayoutError(f"range {start}:{stop} of a range of {last - first} elements")
        return replace(self, window=(first + start, first + stop))

    def flat_shard(self, part: int, parts: int, multiple: int = 1) -> View:
        """Part `part` of `parts` of what is stored, flattened and padded so that each is of one length.

        The length is a multiple of `multiple`.  With 1 it is how ZeRO-3 stores a parameter.
        """
        _check_part(part, parts)
        _check_positive("multiple", multiple)
        size = prod(d.length for d in self.dims) if self.window is None else self.size
        each = -(-size // (parts * multiple)) * multiple
        return self.flat(part * each, (part + 1) * each)

    # -- other arrangements -----------------------------------------------------------------------

    def fused(self, dim: int, sizes: Sequence[int]) -> View:
        """`dim` is several tensors one after the other (q, k, v): the next cut cuts each by itself."""
        stored_dim = self._stored_dim(dim)
        _check_sum(dim, "fused parts", sizes, stored_dim.length)
        return self._with(dim, replace(stored_dim, parts=tuple(sizes)))

    def interleaved(
        self, dim: int, groups: int, sizes: Sequence[int], *, logical: str = "parts"
    ) -> View:
        """`dim` is stored by groups, in each `sizes` of each part: Megatron's q..q k v, q..q k v.

        `logical="parts"`: the logical tensor has all of the first part, then all of the second, and so on.
        `logical="stored"`: it has the stored order, too.  Either way the next cut must fall between groups.
        """
        _check_positive("groups", groups)
        stored_dim = self._plain(dim)
        _check_sum(dim, f"{groups} groups of", [n * groups for n in sizes], stored_dim.length)
        unit = max(1, sum(sizes))
        if logical == "stored":
            return self._with(dim, replace(stored_dim, unit=unit))
        if logical != "parts":
            raise LayoutError(f"logical={logical!r}: it is 'parts' or 'stored'")
        if groups * len(sizes) > _MAX_RUNS:
            raise LayoutError(f"dim {dim}: {groups} groups are too many to tell one by one")
        moves, start, offset = [], 0, 0
        for size in sizes:
            if size == 1:
                moves.append(Move(start, offset, groups, unit))
            else:
                moves += [Move(start + g * size, g * unit + offset, size) for g in range(groups)]
            start, offset = start + size * groups, offset + size
        return self._with(dim, replace(stored_dim.moved(moves, stored_dim.length), unit=unit))

    def padded(self, dim: int, *, to: int | None = None, multiple: int | None = None) -> View:
        """`dim` is stored longer, `to` a length or a multiple of `multiple`; what is added is padding."""
        stored_dim = self._plain(dim)
        if to is not None and multiple is None:
            stored = to
        elif multiple is not None and to is None:
            _check_positive("multiple", multiple)
            stored = -(-stored_dim.length // multiple) * multiple
        else:
            raise LayoutError("padded takes `to` or `multiple`")
        if stored < stored_dim.length:
            raise LayoutError(
                f"dim {dim}: {stored_dim.length} is longer than {stored}, to which it is padded"
            )
        return self._with(dim, replace(stored_dim, length=stored))

    def transposed(self, order: Sequence[int] | None = None) -> View:
        """Stored dim k is what was dim `order[k]`; the order is reversed if none is given."""
        self._check_not_flat()
        places = tuple(reversed(range(len(self.dims)))) if order is None else tuple(order)
        if sorted(places) != list(range(len(self.dims))):
            raise LayoutError(f"{places} is no order of {len(self.dims)} dims")
        return replace(self, dims=tuple(self.dims[d] for d in places))

    def scaled(self, factor: float) -> View:
        """A value is what is stored times `factor`."""
        if not isfinite(factor) or factor == 0:
            raise LayoutError(f"what is stored times {factor} is no value")
        return replace(self, scale=self.scale * factor)

    # -- where it lies ----------------------------------------------------------------------------

    def fragments(self, base: int = 0) -> list[Fragment]:
        """Locate each element in a rank's storage, which begins at element `base` of some file."""
        if not self.is_here:
            return []
        lengths = tuple(d.length for d in self.dims)
        strides, origin, boxes = row_major(lengths), 0, [whole(lengths)]
        if self.window is not None:
            origin, stop = self.window
            boxes = flat_range(lengths, origin, min(stop, prod(lengths)))
        return [
            self._fragment(runs, strides, base - origin)
            for box in boxes
            for runs in product(*(self._runs(i, box) for i in range(len(lengths))))
        ]

    def _runs(self, place: int, box: Box) -> Iterator[Run]:
        """Runs of a dim inside a box of what is stored, as far as strides can tell of them."""
        stored_dim = self.dims[place]
        for run in stored_dim.between(box.start[place], box.stop[place]):
            if place and stored_dim.length % run.step:  # rows that hold no whole number of steps
                for i in range(run.length):
                    yield Run(run.stored + i * run.step, run.logical + i, 1)
            else:
                yield run

    def _fragment(self, runs: tuple[Run, ...], strides: tuple[int, ...], base: int) -> Fragment:
        placed = sorted(zip((d.dim for d in self.dims), runs, strides))
        start = tuple(run.logical for _, run, _ in placed)
        stop = tuple(run.logical + run.length for _, run, _ in placed)
        offset = base + sum(run.stored * stride for _, run, stride in placed)
        steps = tuple(stride * run.step for _, run, stride in placed)
        return Fragment(Box(start, stop), offset, steps, self.scale)

    # -- checks -----------------------------------------------------------------------------------

    def _stored_dim(self, dim: int) -> StoredDim:
        self._check_not_flat()
        if not 0 <= dim < len(self.dims):
            raise LayoutError(f"there is no dim {dim} in what is stored as {self.stored}")
        return self.dims[dim]

    def _plain(self, dim: int) -> StoredDim:
        stored_dim = self._stored_dim(dim)
        if stored_dim.parts or stored_dim.unit != 1:
            raise LayoutError(f"dim {dim} is fused or interleaved: a cut of it must come first")
        return stored_dim

    def _check_not_flat(self) -> None:
        if self.window is not None:
            raise LayoutError("what is stored is flat: it has no dims")

    def _with(self, dim: int, stored_dim: StoredDim) -> View:
        return replace(self, dims=(*self.dims[:dim], stored_dim, *self.dims[dim + 1 :]))

    def _cut(self, dim: int, stored_dim: StoredDim, ends: Sequence[tuple[int, int]]) -> View:
        """Keep `ends` of each part of a dim."""
        lengths = stored_dim.parts or (stored_dim.length,)
        ranges, at = [], 0
        for (a, b), length in zip(ends, lengths):
            if any(end % stored_dim.unit and end != length for end in (a, b)):
                raise LayoutError(f"dim {dim}: {a}:{b} cuts a group of {stored_dim.unit}")
            ranges.append((at + a, at + b))
            at += length
        return self._with(dim, stored_dim.kept(ranges))


def _check_part(part: int, parts: int) -> None:
    if not 0 <= part < parts:
        raise LayoutError(f"there is no part {part} of {parts}")


def _check_positive(what: str, number: int) -> None:
    if number < 1:
        raise LayoutError(f"{what} must be 1 or more, not {number}")


def _check_sum(dim: int, what: str, sizes: Sequence[int], length: int) -> None:
    if not sizes or any(n < 0 for n in sizes):
        raise LayoutError(f"dim {dim}: {what} {tuple(sizes)}: lengths are 0 or more")
    total, some = sum(sizes), " + ".join(map(str, sizes[:16]))
    if total < length:
        raise LayoutError(f"dim {dim}: {what} {some} leave out {total}:{length}")
    if total > length:
        raise LayoutError(f"dim {dim}: {what} {some} make {total}, it has {length}")
