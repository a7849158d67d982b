"""Steps of a rule: each maps a view (holdfast.core.layout.view) to another, for one place of a mesh.

A step holds expressions, which are evaluated for a tensor and a mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from math import prod

from holdfast.core.layout.view import View
from holdfast.formats.rules.expression import SIZE, Expression
from holdfast.formats.rules.source import Span

_Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Coordinates on the axes, sizes of axes, and values of names in expressions."""

    coordinates: Mapping[str, int]
    sizes: Mapping[str, int]
    numbers: Mapping[str, Fraction]

    def parts(self, axes: _Axes) -> int:
        return prod(self.sizes.get(a, 1) for a in axes)

    def part(self, axes: _Axes) -> int:
        """Return the coordinate on several axes combined, outermost first."""
        part = 0
        for axis in axes:
            part = part * self.sizes.get(axis, 1) + self.coordinates.get(axis, 0)
        return part

    def number(self, expression: Expression, size: int | None = None) -> int:
        if size is None:
            return expression.whole(self.numbers)
        return expression.whole({**self.numbers, SIZE: Fraction(size)})


def length(view: View, dim: int) -> int:
    """Return a dim's length in a view; 0 for a missing dim, which the view will refuse."""
    return view.dims[dim].length if dim < len(view.dims) else 0


@dataclass(frozen=True, slots=True)
class Shard:
    """`shard 0 over tp`; how: `chunk`, `even`, `balanced`, or `widths` (a list for each fused part)."""

    span: Span
    dim: int
    axes: _Axes
    how: str = "chunk"
    widths: tuple[tuple[Expression, ...], ...] = ()

    def apply(self, view: View, place: Coordinates) -> View:
        part, parts = place.part(self.axes), place.parts(self.axes)
        if self.how == "widths":
            size = length(view, self.dim)
            widths = [[place.number(e, size) for e in each] for each in self.widths]
            wrong = [len(each) for each in widths if len(each) != parts]
            if wrong:
                raise self.span.error(f"{wrong[0]} widths for {parts} parts")
            return view.split(self.dim, part, widths)
        if self.how == "balanced":
            return view.balanced(self.dim, part, parts)
        return view.shard(self.dim, part, parts, even=self.how == "even")


@dataclass(frozen=True, slots=True)
class Fused:
    """`fused 0 (q, k, v)`."""

    span: Span
    dim: int
    sizes: tuple[Expression, ...]
    axes: _Axes = ()

    def apply(self, view: View, place: Coordinates) -> View:
        size = length(view, self.dim)
        return view.fused(self.dim, [place.number(e, size) for e in self.sizes])


@dataclass(frozen=True, slots=True)
class Interleaved:
    """`interleaved 0 groups (q, k, v)`, or `... stored`: the logical tensor has that order, too."""

    span: Span
    dim: int
    groups: Expression
    sizes: tuple[Expression, ...]
    logical: str = "parts"
    axes: _Axes = ()

    def apply(self, view: View, place: Coordinates) -> View:
        size = length(view, self.dim)
        sizes = [place.number(e, size) for e in self.sizes]
        groups = place.number(self.groups, size)
        if groups > size:
            raise self.groups.span.error(f"{groups} groups of a dim of {size}")
        return view.interleaved(self.dim, groups, sizes, logical=self.logical)


@dataclass(frozen=True, slots=True)
class Padded:
    """`padded 0 to N`, `padded 0 multiple N`; `from N`: the length of the tensor itself."""

    span: Span
    dim: int
    to: Expression | None = None
    multiple: Expression | None = None
    original: Expression | None = None
    axes: _Axes = ()

    def apply(self, view: View, place: Coordinates) -> View:
        size = length(view, self.dim)
        if self.original is not None:
            original = place.number(self.original, size)
            if original != size:
                raise self.original.span.error(f"dim {self.dim} has {size}, not {original}")
        to, multiple = (
            None if e is None else place.number(e, size) for e in (self.to, self.multiple)
        )
        return view.padded(self.dim, to=to, multiple=multiple)


@dataclass(frozen=True, slots=True)
class Experts:
    """`experts 0 over ep`: a dim of experts, divided evenly."""

    span: Span
    dim: int
    axes: _Axes

    def apply(self, view: View, place: Coordinates) -> View:
        return view.experts(self.dim, place.part(self.axes), place.parts(self.axes))


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """`experts {expert} of N over ep`: a tensor per expert, its number in the name; N / ep on each rank."""

    span: Span
    expert: Expression
    count: Expression
    axes: _Axes

    def holder(self, place: Coordinates) -> int:
        """The part of `axes` that holds the expert."""
        expert, count = place.number(self.expert), place.number(self.count)
        parts = place.parts(self.axes)
        if not 0 <= expert < count:
            raise self.span.error(f"expert {expert} of {count}")
        if count % parts:
            raise self.span.error(f"{count} experts do not divide into {parts} equal parts")
        return expert // (count // parts)

    def apply(self, view: View, place: Coordinates) -> View:
        return view if place.part(self.axes) == self.holder(place) else view.absent()


@dataclass(frozen=True, slots=True)
class On:
    """`on pp 0`, `on pp (0, pp - 1)`: only ranks at these coordinates have the tensor."""

    span: Span
    axes: _Axes
    coordinates: tuple[Expression, ...]

    def allowed(self, place: Coordinates) -> tuple[int, ...]:
        """Return the coordinates, ascending.  RuleError for one that the axis does not have."""
        size, found = place.parts(self.axes), set()
        for expression in self.coordinates:
            at = place.number(expression)
            if not 0 <= at < size:
                raise expression.span.error(f"{self.axes[0]} has ranks 0..{size - 1}, not {at}")
            found.add(at)
        return tuple(sorted(found))

    def apply(self, view: View, place: Coordinates) -> View:
        return view if place.part(self.axes) in self.allowed(place) else view.absent()


@dataclass(frozen=True, slots=True)
class Transposed:
    """`transposed`, or `transposed (1, 2, 0)`."""

    span: Span
    order: tuple[int, ...] | None = None
    axes: _Axes = ()

    def apply(self, view: View, place: Coordinates) -> View:
        return view.transposed(self.order)


@dataclass(frozen=True, slots=True)
class Scaled:
    """`scaled tp`: a value is the stored value times this; optimizer states use other powers."""

    span: Span
    factor: Expression
    axes: _Axes = ()

    def apply(self, view: View, place: Coordinates) -> View:
        return view.scaled(float(self.factor.value(place.numbers)))


@dataclass(frozen=True, slots=True)
class Flat:
    """`flat over dp`: flattened, padded and divided into equal parts of a multiple of a length."""

    span: Span
    axes: _Axes
    multiple: Expression | None = None

    def apply(self, view: View, place: Coordinates) -> View:
        multiple = 1 if self.multiple is None else place.number(self.multiple)
        return view.flat_shard(place.part(self.axes), place.parts(self.axes), multiple)


RuleStep = (
    Shard | Fused | Interleaved | Padded | Experts | ExpertTensors | On | Transposed | Scaled | Flat
)
"""A step has a `span`, the `axes` over which it divides, and `apply`, which maps a view to a view."""


def expressions_of(step: RuleStep) -> list[Expression]:
    """Return the expressions among the fields of a step, in their order."""
    found: list[Expression] = []
    todo = [getattr(step, f.name) for f in reversed(fields(step))]
    while todo:
        value = todo.pop()
        if isinstance(value, Expression):
            found.append(value)
        elif isinstance(value, tuple):
            todo += reversed(value)
    return found
