"""Tells whether a place may hold a checkpoint of another system.

The readers of other formats are imported only where something lies that is not ours: a run that saves in
its own root never needs them.
"""

from __future__ import annotations

import os

from holdfast.store import LocalStore, open_store, split_prefix

OWN = frozenset({"steps", "claims", "log", "job.json", "tuning.json"})
"""All that holdfast keeps directly below a root."""


def foreign_format(url: str) -> str | None:
    """Return the foreign format that a prefix names or that lies there; None if it is ours, or nothing."""
    if split_prefix(url) is None and _is_own(url):
        return None
    from holdfast.interop.detect import detect

    return detect(url)


def _is_own(url: str) -> bool:
    store = open_store(url)
    if not isinstance(store, LocalStore):
        return False
    try:
        with os.scandir(store.root) as entries:
            return all(e.name in OWN or e.name.startswith(".") for e in entries)
    except FileNotFoundError:
        return True  # there is nothing
    except OSError:
        return False  # whoever reads it says what is wrong
