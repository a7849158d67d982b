"""Checkpoints below a folder that is none itself: roots of holdfast, and checkpoints of other systems."""

from __future__ import annotations

import os
from dataclasses import dataclass

from holdfast.base.errors import HoldfastError
from holdfast.core.checkpoint.lone import LoneStep, root_at
from holdfast.core.checkpoint.names import step_numbers
from holdfast.core.store import LocalStore
from holdfast.formats.read.detect import detect, steps_as
from holdfast.formats.read.folder import open_place

_DEPTH = 2
_MOST_FOLDERS = 500
"""Most folders that are looked at, since any folder may be asked about."""


@dataclass(frozen=True, slots=True)
class Below:
    """A checkpoint below a folder.  `path`: from that folder; `format`: `holdfast`, or a prefix."""

    path: str
    format: str
    steps: tuple[int, ...]


def below(url: str) -> list[Below]:
    """Return the checkpoints in folders at most two levels below a local folder, sorted by path."""
    store = open_place(url)
    if not isinstance(store, LocalStore):
        return []
    found: list[Below] = []
    names = [(name, 1) for name in _folders(store.root)]
    for number, (name, depth) in enumerate(names):  # it grows
        if number >= _MOST_FOLDERS:
            break
        path = os.path.join(store.root, name)
        try:
            one = _look(path, name)
        except HoldfastError:
            continue  # whoever opens it says what is wrong
        if one is not None:
            found.append(one)
        elif depth < _DEPTH:
            names += [(os.path.join(name, inner), depth + 1) for inner in _folders(path)]
    return sorted(found, key=lambda one: one.path)


def below_hint(url: str, most: int = 3) -> str | None:
    """Return a hint with the first checkpoints below a folder; None if there are none."""
    found = below(url)
    names = [os.path.join(url, one.path) for one in found[:most]]
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return f"below it lie {', '.join(names)}{more}" if found else None


def _folders(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    except OSError:
        return []


def _look(path: str, name: str) -> Below | None:
    foreign = detect(path)
    if foreign is not None:
        return Below(name, foreign, tuple(steps_as(foreign, path)))
    store = root_at(path)
    steps = step_numbers(store)
    return None if isinstance(store, LoneStep) or not steps else Below(name, "holdfast", (*steps,))
