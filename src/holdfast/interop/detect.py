"""Which format lies at a place: by a prefix (`dcp:PATH`), or by what is there."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.checkpoint.names import committed
from holdfast.checkpoint.opened import Checkpoint
from holdfast.errors import NotFound, UsageError
from holdfast.interop.dcp import is_dcp, open_dcp
from holdfast.near import near
from holdfast.store import Store, open_store


@dataclass(frozen=True, slots=True)
class Format:
    """What there is to know of a foreign format."""

    is_there: Callable[[Store], bool]
    open: Callable[[Store, int | None], Checkpoint]
    """Step None: the newest.  NotFound if there is no such step."""
    steps: Callable[[Store], list[int]]
    """Ascending."""


FORMATS = {
    "dcp": Format(is_dcp, open_dcp, lambda _: [0]),
}
"""By prefix, in the order in which they are looked for."""


def detect(url: str | os.PathLike[str]) -> str | None:
    """The foreign format that a prefix names or that lies there; None if it is ours, or nothing.

    A root with steps of our own is ours, whatever else lies in it.
    """
    prefix, path = _split(os.fspath(url))
    store = open_store(path)
    if prefix:
        if not FORMATS[prefix].is_there(store):
            raise NotFound(f"no {prefix} checkpoint in {store.url}")
        return prefix
    found = next((name for name, format in FORMATS.items() if format.is_there(store)), None)
    return None if found is None or committed(store) else found


def open_as(name: str, url: str | os.PathLike[str], step: int | None = None) -> Checkpoint:
    """Open what `detect` has found.  NotFound if there is no step `step`."""
    return FORMATS[name].open(open_store(_split(os.fspath(url))[1]), step)


def steps_as(name: str, url: str | os.PathLike[str]) -> list[int]:
    """The steps of what `detect` has found, ascending."""
    return FORMATS[name].steps(open_store(_split(os.fspath(url))[1]))


def _split(text: str) -> tuple[str, str]:
    """(prefix or "", path or URL).  A path that exists is a path, with or without a colon."""
    prefix, colon, rest = text.partition(":")
    if not colon or "/" in prefix or rest.startswith("//") or os.path.exists(text):
        return "", text
    if prefix not in FORMATS:
        raise UsageError(f"unknown format {prefix!r} in {text!r}", hint=near(prefix, FORMATS))
    return prefix, rest
