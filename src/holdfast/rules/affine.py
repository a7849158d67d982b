"""DeepSpeed's affine maps: which blocks of a parameter each rank's slice consists of.

A map lists, by rank, the slice's shape and pieces: shape, offset and strides in the whole parameter and in
the slice, perhaps a scale (slice = whole * scale).  All that DeepSpeed makes are ranges of rows along one
dim, stored one after the other, so a rank's part is a view; a map of any other kind is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.errors import RuleError
from holdfast.layout import row_major
from holdfast.layout.view import View
from holdfast.rules.layout import POWERS

Shape = tuple[int, ...]


def view_of_map(name: str, entry: Mapping[str, Any], rank: int, state: str) -> View:
    """A rank's slice by an affine map: ranges of rows of one dim, in any order."""
    shape = _ints(entry["logical_shape"])
    ranks = {int(r): value for r, value in entry["ranks"].items()}
    if rank not in ranks:
        raise RuleError(f"{name!r}: its affine map has no rank {rank}")
    stored = _ints(ranks[rank]["shard_shape"])
    cut = [d for d, (a, b) in enumerate(zip(shape, stored)) if a != b]
    pieces = sorted(ranks[rank]["pieces"], key=lambda p: int(p["dest"][0]))
    scales = {float(p.get("scale", 1.0)) for p in pieces} or {1.0}
    if len(shape) != len(stored) or len(cut) > 1 or len(scales) > 1:
        raise RuleError(f"{name!r}: an affine map that is no cut along one dim")
    view = View.whole(shape)
    if shape:
        view = _rows(name, view, pieces, stored, cut[0] if cut else 0)
    (scale,) = scales
    if scale == 1.0:
        return view
    if state not in POWERS:
        raise RuleError(f"{name!r} is scaled, and what that means for state {state!r} is not known")
    return view.scaled((1 / scale) ** POWERS[state])


def _rows(name: str, view: View, pieces: list[Mapping[str, Any]], stored: Shape, dim: int) -> View:
    """The rows of `dim` that pieces are, which must lie in the slice one after the other."""
    shape, ranges, at = view.shape, [], 0
    from_strides, to_strides = row_major(shape), row_major(stored)
    for piece in pieces:
        size = _ints(piece["shape"])
        (source, from_given), (dest, to_given) = piece["source"], piece["dest"]
        rows, start = size[dim], int(source) // max(1, from_strides[dim])
        described = (
            (*shape[:dim], rows, *shape[dim + 1 :]),
            (start * from_strides[dim], at * to_strides[dim]),
            (from_strides, to_strides),
        )
        if (size, (source, dest), (_ints(from_given), _ints(to_given))) != described:
            if all(size):
                raise RuleError(f"{name!r}: an affine map with a piece that is no range of rows")
            continue
        ranges.append((start, start + rows))
        at += rows
    return view.picked(dim, ranges)


def _ints(numbers: Any) -> Shape:
    return tuple(int(n) for n in numbers)
