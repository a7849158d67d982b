"""Texts of rules (presets and files), and errors that quote their place in a text.

Only this module opens files.

gpt.rules:3: there is no axis 'tpp'
  **.linear_qkv.weight  unique, shard 0 over tpp
                                             ^^^
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from holdfast.base.errors import RuleError
from holdfast.base.suggest import did_you_mean
from holdfast.base.text import listed

MAX_RULES_CHARS = 1 << 20
_SUFFIX = ".rules"
_MAX_SHOWN = 160
"""Most columns shown of a quoted line."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text and its name in messages: a path, or the name of a preset."""

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
        skip = max(0, min(len(shown), self.column + self.width + 20) - _MAX_SHOWN)
        skip = min(skip, self.column)
        carets = "^" * max(1, min(self.width, _MAX_SHOWN - (self.column - skip)))
        return f"  {shown[skip : skip + _MAX_SHOWN]}\n  {' ' * (self.column - skip)}{carets}"

    def says(self, message: str) -> str:
        """`message` with file, line, quote and caret."""
        return f"{self.source.path}:{self.line}: {message}\n{self.quote()}"

    def error(self, message: str, hint: str | None = None) -> RuleError:
        return RuleError(self.says(message), hint=hint)

    def to(self, other: Span) -> Span:
        """The span from here to the end of `other`, if that is on the same line."""
        if other.line != self.line:
            return self
        return Span(self.source, self.line, self.column, other.column + other.width - self.column)


def unknown(what: str, name: str, known: Iterable[str], span: Span) -> RuleError:
    """Return the error for an unknown name, with near misses or the known names."""
    names = sorted(set(known))
    some = f"there are {listed(names, 12)}" if names else "there are none"
    return span.error(f"there is no {what} {name!r}", did_you_mean(name, names) or some)


def presets() -> list[str]:
    """The names of the presets."""
    folder = files("holdfast.formats.rules") / "presets"
    return sorted(
        p.name.removesuffix(_SUFFIX) for p in folder.iterdir() if p.name.endswith(_SUFFIX)
    )


def source_of(what: str, folder: Path | None = None) -> Text:
    """A preset by its name; else a file, relative to `folder`.  RuleError if there is neither."""
    if what in presets():
        return Text(
            what,
            (files("holdfast.formats.rules") / "presets" / (what + _SUFFIX)).read_text("utf-8"),
        )
    path = (folder or Path()) / what
    try:
        if path.is_file() and path.stat().st_size <= 4 * MAX_RULES_CHARS:
            return Text(str(path), path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise RuleError(f"rules {what!r} cannot be read: {error}") from None
    if path.exists():
        raise RuleError(f"{path}: no file of rules")
    raise RuleError(
        f"there is neither a preset nor a file {what!r}",
        hint=did_you_mean(what, presets()) or f"presets are {', '.join(presets())}",
    )
