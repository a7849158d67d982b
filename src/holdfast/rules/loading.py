"""Texts of rules: presets that come with holdfast, files, and what they include.

The only module of this layer that opens files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from holdfast.errors import RuleError
from holdfast.near import near
from holdfast.rules.parser import MAX_TEXT, parsed
from holdfast.rules.source import Text
from holdfast.rules.statements import Include, Let, Statement

SUFFIX = ".rules"
MAX_INCLUDES = 100


def presets() -> list[str]:
    """The names of the presets."""
    folder = files("holdfast.rules") / "presets"
    return sorted(p.name.removesuffix(SUFFIX) for p in folder.iterdir() if p.name.endswith(SUFFIX))


def source_of(what: str, folder: Path | None = None) -> Text:
    """A preset by its name; else a file, relative to `folder`.  RuleError if there is neither."""
    if what in presets():
        return Text(
            what, (files("holdfast.rules") / "presets" / (what + SUFFIX)).read_text("utf-8")
        )
    path = (folder or Path()) / what
    try:
        if path.is_file() and path.stat().st_size <= 4 * MAX_TEXT:
            return Text(str(path), path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise RuleError(f"rules {what!r} cannot be read: {error}") from None
    if path.exists():
        raise RuleError(f"{path}: no file of rules")
    raise RuleError(
        f"there is neither a preset nor a file {what!r}",
        hint=near(what, presets()) or f"presets are {', '.join(presets())}",
    )


def statements_of(source: Text, seen: tuple[str, ...] = ()) -> Iterator[Statement]:
    """A text's statements, in the place of each include what it includes."""
    inside = (*seen, source.path)
    for statement in parsed(source):
        if isinstance(statement, Let):
            statement = replace(statement, depth=len(seen))
        if not isinstance(statement, Include):
            yield statement
            continue
        folder = None if source.path in presets() else Path(source.path).parent
        try:
            found = source_of(statement.what, folder)
        except RuleError as error:
            raise statement.span.error(error.message, error.hint) from None
        if found.path in inside or len(inside) > MAX_INCLUDES:
            raise statement.span.error(f"{found.path} includes itself")
        yield from statements_of(found, inside)
