"""Holes that boxes of several holders leave in a tensor, and their overlaps."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.layout import Box, num_corners, tiles, whole

MAX_CORNERS = 1 << 22
MAX_BOXES = 1 << 11
"""Most boxes that are looked at one against the other, once it is known that something is wrong."""

Held = Sequence[tuple[str, Sequence[Box]]]


def gap_or_overlap(shape: tuple[int, ...], held: Held) -> str | None:
    """Describe what is wrong, with the region; None if every element is held exactly once."""
    boxes = [box for _, some in held for box in some if box.size]
    if num_corners(boxes, shape) > MAX_CORNERS:
        return f"{len(boxes):,} fragments are too many to check"
    if tiles(boxes, shape):
        return None
    return _overlap(held) or _hole(shape, boxes) or "its parts do not make it up exactly once"


def gap(shape: tuple[int, ...], held: Held) -> str | None:
    """A region that nobody holds, if there is one; what is held twice is not looked for."""
    return _hole(shape, [box for _, some in held for box in some if box.size])


def _overlap(held: Held) -> str | None:
    flat = [(who, box) for who, some in held for box in some if box.size][:MAX_BOXES]
    flat.sort(key=lambda item: item[1].start)
    for i, (who, box) in enumerate(flat):
        for other, another in flat[i + 1 :]:
            if another.start and another.start[0] >= box.stop[0]:
                break
            both = box & another
            if both is not None:
                return f"{_region(both)} is held twice, by {who} and by {other}"
    return None


def _hole(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    left = [whole(shape)] if whole(shape).size else []
    for box in boxes[:MAX_BOXES]:
        left = [piece for old in left for piece in _without(old, box)]
        if len(left) > MAX_BOXES:
            return None
    if not left or len(boxes) > MAX_BOXES:
        return None
    region = max(left, key=lambda b: b.size)
    more = f" (and {len(left) - 1} more regions)" if len(left) > 1 else ""
    return f"no rank holds {_region(region)}{more}"


def _without(box: Box, other: Box) -> list[Box]:
    """Return what `other` leaves of a box, as boxes."""
    common = box & other
    if common is None:
        return [box]
    pieces, start, stop = [], list(box.start), list(box.stop)
    for d in range(len(start)):
        if start[d] < common.start[d]:
            pieces.append(Box(tuple(start), (*stop[:d], common.start[d], *stop[d + 1 :])))
        if common.stop[d] < stop[d]:
            pieces.append(Box((*start[:d], common.stop[d], *start[d + 1 :]), tuple(stop)))
        start[d], stop[d] = common.start[d], common.stop[d]
    return pieces


def _region(box: Box) -> str:
    return f"[{box}]"
