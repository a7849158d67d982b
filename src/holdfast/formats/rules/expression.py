"""Numbers in rules: `heads / kv_heads * head_dim`.

`/` divides exactly, `//` rounds down.  Names are variables, captures of the pattern, mesh axes (their size)
and `size`, the length of the dim that a step acts on.  An expression is stored in postfix form, so that
evaluation does not recurse; numbers stay below 2**63.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from operator import add, floordiv, mod, mul, sub, truediv

from holdfast.formats.rules.source import Span

_LIMIT = 1 << 63
_OPERATORS: dict[str, Callable[[Fraction, Fraction], Fraction | int]] = {
    "+": add, "-": sub, "*": mul, "/": truediv, "//": floordiv, "%": mod,
}  # fmt: skip
SIZE = "size"

_Numbers = Mapping[str, Fraction]


@dataclass(frozen=True, slots=True)
class Named:
    """A name and its place in the text."""

    name: str
    span: Span


@dataclass(frozen=True, slots=True)
class Operator:
    """`+ - * / // %` and its place in the text."""

    sign: str
    span: Span


Item = Fraction | Named | Operator


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression of numbers in postfix form."""

    items: tuple[Item, ...]
    span: Span

    def names(self) -> list[Named]:
        return [item for item in self.items if isinstance(item, Named)]

    def value(self, numbers: _Numbers) -> Fraction:
        """Evaluate; RuleError for a division by zero or too large a number."""
        stack: list[Fraction] = []
        for item in self.items:
            if isinstance(item, Operator):
                right, left = stack.pop(), stack.pop()
                stack.append(_computed(item, left, right))
            else:
                stack.append(numbers[item.name] if isinstance(item, Named) else item)
        (result,) = stack
        return result

    def whole(self, numbers: _Numbers) -> int:
        """Evaluate to a whole number; RuleError if it is none."""
        value = self.value(numbers)
        if value.denominator != 1:
            raise self.span.error(f"{value} is not a whole number{self._of(numbers)}")
        return int(value)

    def _of(self, numbers: _Numbers) -> str:
        found = {n.name: numbers[n.name] for n in self.names()}
        return f": {', '.join(f'{k} is {v}' for k, v in found.items())}" if found else ""


def _computed(operator: Operator, left: Fraction, right: Fraction) -> Fraction:
    sign = operator.sign
    if sign in ("/", "//", "%") and not right:
        raise operator.span.error("division by zero")
    result = Fraction(_OPERATORS[sign](left, right))
    if abs(result.numerator) >= _LIMIT or result.denominator >= _LIMIT:
        raise operator.span.error("the number is too large")
    return result
