"""Places in a text, and errors that show them.

gpt.rules:3: there is no axis 'tpp'
  **.linear_qkv.weight  unique, shard 0 over tpp
                                             ^^^
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.errors import RuleError
from holdfast.near import near

MAX_SHOWN = 160
"""Most columns of a quoted line that are shown."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text and what it is called in messages: a path, or the name of a preset."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Span:
    """`width` columns of a line from `column` on; lines count from 1, columns from 0."""

    source: Text
    line: int
    column: int
    width: int

    def quote(self) -> str:
        """The line and a caret below."""
        text = self.source.text.split("\n")[self.line - 1].rstrip("\r")
        shown = "".join(c if c.isprintable() else " " for c in text)
        skip = max(0, min(len(shown), self.column + self.width + 20) - MAX_SHOWN)
        skip = min(skip, self.column)
        carets = "^" * max(1, min(self.width, MAX_SHOWN - (self.column - skip)))
        return f"  {shown[skip : skip + MAX_SHOWN]}\n  {' ' * (self.column - skip)}{carets}"

    def says(self, message: str) -> str:
        """`message` with file, line, quote and caret."""
        return f"{self.source.path}:{self.line}: {message}\n{self.quote()}"

    def error(self, message: str, hint: str | None = None) -> RuleError:
        return RuleError(self.says(message), hint=hint)

    def to(self, other: Span) -> Span:
        """From here to the end of `other`, if that is on the line."""
        if other.line != self.line:
            return self
        return Span(self.source, self.line, self.column, other.column + other.width - self.column)


def unknown(what: str, name: str, known: Iterable[str], span: Span) -> RuleError:
    """Make the error for a name that is not there; it names near misses, or what there is."""
    names = sorted(set(known))
    some = f"there are {', '.join(names[:12])}" if names else "there are none"
    return span.error(f"there is no {what} {name!r}", near(name, names) or some)
