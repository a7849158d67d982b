"""The layout of a tensor over a mesh by its rule, and the check that ranks store every element once.

If they do not, the message names a hole between the ranks' boxes, or an overlap.

Tensors of one shape and one rule share a `ShapeLayout`, so that thousands of them cost what a few do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import product

from holdfast.base.errors import LayoutError, RuleError
from holdfast.base.text import listed
from holdfast.core.layout import Box, Cut, Fragment, Mesh, Sharding, num_corners, tiles, whole
from holdfast.core.layout.view import View
from holdfast.formats.rules import steps
from holdfast.formats.rules.source import Span
from holdfast.formats.rules.statements import Replica, Rule

POWERS = {"param": 1, "exp_avg": -1, "exp_avg_sq": -2}
"""Power of a scale by state: if parameters are scaled by s, gradients are scaled by 1 / s."""


class Unfit(LayoutError):
    """A rule does not fit a shape; `span`: the step at fault."""

    def __init__(self, span: Span, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.span = span


@dataclass(eq=False)
class ShapeLayout:
    """The layout, over a mesh, of all tensors with one shape and one rule.

    `numbers` are those that its expressions name, `copies` the axes along which there may be copies.
    """

    shape: tuple[int, ...]
    rule: Rule
    mesh: Mesh
    numbers: Mapping[str, Fraction]
    state: str
    copies: tuple[str, ...]

    def __post_init__(self) -> None:
        self.axes = tuple(a for a, n in self.mesh.axes if n > 1 and a in self.rule.axes)
        self.view = lru_cache(1 << 12)(self._view)
        self.real = lru_cache(1 << 12)(self._real)

    def at(self, rank: int) -> tuple[int, ...]:
        """A rank's coordinates on `axes`."""
        return tuple(self.mesh.coordinate(rank, a) for a in self.axes)

    def views(self) -> Iterator[tuple[dict[str, int], View]]:
        """Yield each distinct view with its coordinates on `axes`."""
        for at in product(*(range(self.mesh.sizes[a]) for a in self.axes)):
            yield dict(zip(self.axes, at)), self.view(at)

    def _view(self, at: tuple[int, ...]) -> View:
        place = self._place(dict(zip(self.axes, at)))
        view = View.whole(self.shape)
        for step in self.rule.steps:
            if not view.is_here:
                break
            try:
                view = step.apply(view, place)
            except LayoutError as error:
                raise Unfit(step.span, error.message, error.hint) from None
        return self._powered(view)

    def _place(self, coordinates: Mapping[str, int]) -> steps.Coordinates:
        return steps.Coordinates(coordinates, self.mesh.sizes, self.numbers)

    def _powered(self, view: View) -> View:
        if view.scale == 1:
            return view
        if self.state not in POWERS:
            message = f"what a scale means for state {self.state!r} is not known"
            raise Unfit(self.rule.span, message, f"it is known of {', '.join(POWERS)}")
        return replace(view, scale=view.scale ** POWERS[self.state])

    @cached_property
    def sharding(self) -> Sharding | None:
        """The layout as cuts over axes; None if it does not have that form."""
        cuts: list[Cut] = []
        on: dict[str, tuple[int, ...]] = {}
        dims, fused, place = list(range(len(self.shape))), set[int](), self._place({})
        self.view(self.at(0))  # its checks
        for step in self.rule.steps:
            axes = tuple(a for a in step.axes if a in self.axes)
            if isinstance(step, steps.Transposed) and not fused:
                dims = [dims[d] for d in step.order] if step.order else dims[::-1]
            elif isinstance(step, steps.Fused):
                fused.add(step.dim)
            elif isinstance(step, (steps.Shard, steps.Experts)) and not axes:
                fused.discard(step.dim)
            elif isinstance(step, (steps.Shard, steps.Experts)) and _is_chunk(step, fused):
                cuts.append(Cut(dims[step.dim], axes))
            elif isinstance(step, (steps.On, steps.ExpertTensors)) and len(axes) <= 1:
                chosen = (
                    step.allowed(place) if isinstance(step, steps.On) else (step.holder(place),)
                )
                if axes and on.setdefault(axes[0], chosen) != chosen:
                    return None
            else:
                return None
        named = [a for cut in cuts for a in cut.axes] + list(on)
        if len(set(named)) != len(named):
            return None
        return Sharding(tuple(cuts), tuple(sorted(on.items())))

    @cached_property
    def problem(self) -> tuple[str, str | None] | None:
        """Message and hint if ranks do not hold every element exactly once; else None."""
        if self.rule.replica == "unique":
            for axis, size in self.mesh.axes:
                if size > 1 and axis not in self.rule.axes + self.copies:
                    return (
                        f"it is unique, but all {size} ranks along {axis} hold it",
                        f"divide it over {axis}, or say replicated, or `copies {axis}` above all rules",
                    )
        if self.sharding is not None and not self.sharding.on:
            return None  # cuts over distinct axes cover the tensor
        held = [(at, v) for at, v in self.views() if v.is_here]
        if self.rule.replica != "unique":
            distinct = {(v.dims, v.window, v.scale): (at, v) for at, v in reversed(held)}
            held = list(distinct.values())
        found = gap_or_overlap(
            self.shape, [(_place_text(at), [f.box for f in v.fragments()]) for at, v in held]
        )
        return (found, None) if found else None

    def _real(self, at: tuple[int, ...]) -> int:
        """Number of elements stored there, without padding."""
        return sum(f.box.size for f in self.view(at).fragments())


@dataclass(frozen=True)
class Layout:
    """The layout of a tensor over a mesh by its rule."""

    name: str
    alike: ShapeLayout

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the logical tensor."""
        return self.alike.shape

    @property
    def rule(self) -> Rule:
        return self.alike.rule

    @property
    def replica(self) -> Replica:
        return self.alike.rule.replica

    def view(self, rank: int) -> View:
        """Return a rank's view.  RuleError if the rule's steps do not fit the shape."""
        try:
            return self.alike.view(self.alike.at(rank))
        except Unfit as error:
            raise self._error(error.span, error.message, error.hint) from None

    def fragments(self, rank: int) -> list[Fragment]:
        """Return the boxes that a rank stores, with their places in its storage."""
        return self.view(rank).fragments()

    def sharding(self) -> Sharding | None:
        """The layout as cuts over axes; None if it is fused, reordered, padded or flat.

        A sharding says which boxes ranks hold, not how they store them, nor a scale.
        """
        self.view(0)
        return self.alike.sharding

    def check(self) -> None:
        """Check that ranks hold every element exactly once.
        RuleError names the region that they do not.

        Copies of what is replicated or averaged count once, and so do those along axes of copies.
        """
        try:
            problem = self.alike.problem
        except Unfit as error:
            raise self._error(error.span, error.message, error.hint) from None
        if problem:
            raise self._error(self.rule.span, *problem)

    def _error(self, span: Span, message: str, hint: str | None) -> RuleError:
        return span.error(f"{self.name!r} {self.shape} over {self.alike.mesh}: {message}", hint)


def _is_chunk(step: steps.Shard | steps.Experts, fused: set[int]) -> bool:
    whole = isinstance(step, steps.Experts) or step.how in ("chunk", "even")
    return whole and step.dim not in fused


def _place_text(at: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {i}" for axis, i in at.items()) or "the rank"


# -- holes and overlaps ---------------------------------------------------------------------------


_MAX_CORNERS = 1 << 22
_MAX_BOXES = 1 << 11
"""Most boxes that are compared pairwise, to find the fault of a wrong layout."""

_Held = Sequence[tuple[str, Sequence[Box]]]


def gap_or_overlap(shape: tuple[int, ...], held: _Held) -> str | None:
    """Describe a hole or an overlap; None if every element is held exactly once."""
    boxes = [box for _, some in held for box in some if box.size]
    if num_corners(boxes, shape) > _MAX_CORNERS:
        return f"{len(boxes):,} fragments are too many to check"
    if tiles(boxes, shape):
        return None
    return _overlap(held) or _hole(shape, boxes) or "its parts do not make it up exactly once"


def gap(shape: tuple[int, ...], held: _Held) -> str | None:
    """Describe a hole; None if there is none.  Ignores overlaps."""
    return _hole(shape, [box for _, some in held for box in some if box.size])


def _overlap(held: _Held) -> str | None:
    flat = [(who, box) for who, some in held for box in some if box.size][:_MAX_BOXES]
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
    for box in boxes[:_MAX_BOXES]:
        left = [piece for old in left for piece in _without(old, box)]
        if len(left) > _MAX_BOXES:
            return None
    if not left or len(boxes) > _MAX_BOXES:
        return None
    largest_first = sorted(left, key=lambda box: -box.size)
    return f"no rank holds {listed(map(_region, largest_first), 1)}"


def _without(box: Box, other: Box) -> list[Box]:
    """Return `box` minus `other`, as boxes."""
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
