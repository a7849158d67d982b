"""Which format lies at a place: by a prefix (`dcp:PATH`), or by what is there."""

from __future__ import annotations

import os

from holdfast.checkpoint.names import committed
from holdfast.checkpoint.opened import Checkpoint
from holdfast.errors import NotFound, UsageError
from holdfast.interop.dcp import is_dcp, open_dcp
from holdfast.near import near
from holdfast.store import open_store

FORMATS = {"dcp": (is_dcp, open_dcp)}
"""By prefix: whether a store holds it, and how it is opened."""


def detect(url: str | os.PathLike[str]) -> str | None:
    """The foreign format that a prefix names or that lies there; None if it is ours, or nothing.

    A root with steps of our own is ours, whatever else lies in it.
    """
    prefix, path = _split(os.fspath(url))
    store = open_store(path)
    if prefix:
        if not FORMATS[prefix][0](store):
            raise NotFound(f"no {prefix} checkpoint in {store.url}")
        return prefix
    found = next((name for name, (is_there, _) in FORMATS.items() if is_there(store)), None)
    return None if found is None or committed(store) else found


def open_as(name: str, url: str | os.PathLike[str], step: int | None = None) -> Checkpoint:
    """Open what `detect` has found.  NotFound if it is not of step `step`."""
    store = open_store(_split(os.fspath(url))[1])
    checkpoint = FORMATS[name][1](store)
    if step not in (None, checkpoint.step):
        raise NotFound(f"{store.url} is a {name} checkpoint; it has no step {step}")
    return checkpoint


def _split(text: str) -> tuple[str, str]:
    """(prefix or "", path or URL).  A path that exists is a path, with or without a colon."""
    prefix, colon, rest = text.partition(":")
    if not colon or "/" in prefix or rest.startswith("//") or os.path.exists(text):
        return "", text
    if prefix not in FORMATS:
        raise UsageError(f"unknown format {prefix!r} in {text!r}", hint=near(prefix, FORMATS))
    return prefix, rest
