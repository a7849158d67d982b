"""The statements of rules, as parsed, with names unresolved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.formats.rules.expression import Expression, Named
from holdfast.formats.rules.pattern import Pattern
from holdfast.formats.rules.source import Span
from holdfast.formats.rules.steps import RuleStep, expressions_of

Replica = Literal["unique", "replicated", "averaged"]
REPLICAS: tuple[Replica, ...] = ("unique", "replicated", "averaged")


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """`pattern replica, step, step`, `text` without the pattern.  Equal to itself alone.

    `optional`: it may go unused.
    """

    pattern: Pattern
    replica: Replica
    steps: tuple[RuleStep, ...]
    span: Span
    text: str
    named_axes: tuple[Named, ...] = ()
    optional: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that its steps name, each once."""
        return tuple(dict.fromkeys(a for step in self.steps for a in step.axes))

    @property
    def expressions(self) -> list[Expression]:
        """The expressions of all steps."""
        return [e for step in self.steps for e in expressions_of(step)]


@dataclass(frozen=True, slots=True)
class Let:
    """`let heads = 32`.  `depth`: number of nested includes that it came through."""

    name: str
    value: Expression
    span: Span
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Need:
    """`need heads, kv_heads`."""

    names: tuple[Named, ...]


@dataclass(frozen=True, slots=True)
class Axes:
    """`axes pp, tp`; or `copies dp`: axes along which every tensor has copies."""

    names: tuple[Named, ...]
    copies: bool


@dataclass(frozen=True, slots=True)
class Include:
    """`include llama`, `include "../common.rules"`."""

    what: str
    span: Span


@dataclass(frozen=True, slots=True, eq=False)
class Rename:
    """`rename h.{n}.ln.{x:**} -> layers.{n}.norm.{x}`; the left side defines the captures."""

    old: Pattern
    new: Pattern
    span: Span
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Optional:
    """`optional`: rules of this file may go unused."""

    span: Span


Statement = Rule | Let | Need | Axes | Include | Rename | Optional
