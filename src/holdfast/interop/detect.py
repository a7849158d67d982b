"""Which format lies at a place: by a prefix (`dcp:PATH`), or by what is there."""

from __future__ import annotations

import os

from holdfast.checkpoint.opened import Checkpoint
from holdfast.errors import NotFound, UsageError
from holdfast.interop.dcp import is_dcp, open_dcp
from holdfast.near import near
from holdfast.store import open_store

FORMATS = {"dcp": (is_dcp, open_dcp)}
"""By prefix: whether a store holds it, and how it is opened."""


def open_foreign(url: str | os.PathLike[str], step: int | None = None) -> Checkpoint | None:
    """A foreign checkpoint, or None if what lies there is none (or nothing).

    NotFound if a prefix says that there is one, or if it is not of step `step`.
    """
    text = os.fspath(url)
    prefix, colon, rest = text.partition(":")
    named = bool(colon) and "/" not in prefix and not rest.startswith("//")
    if named and prefix not in FORMATS:
        if os.path.exists(text):
            return None
        raise UsageError(f"unknown format {prefix!r} in {text!r}", hint=near(prefix, FORMATS))
    store = open_store(rest if named else text)
    for name, (found, opened) in FORMATS.items():
        if named and name != prefix:
            continue
        if not found(store):
            if named:
                raise NotFound(f"no {name} checkpoint in {store.url}")
            continue
        checkpoint = opened(store)
        if step not in (None, checkpoint.step):
            raise NotFound(f"{store.url} is a {name} checkpoint; it has no step {step}")
        return checkpoint
    return None
