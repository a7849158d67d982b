"""Lists in messages: the first of many, and how many there are besides."""

from __future__ import annotations

from collections.abc import Iterable


def listed(names: Iterable[object], most: int = 3) -> str:
    """Return names in a row: `a, b, c and 4 more`."""
    every = [*map(str, names)]
    others = f" and {len(every) - most:,} more" if len(every) > most else ""
    return ", ".join(every[:most]) + others


def first_of(texts: Iterable[str], most: int) -> list[str]:
    """Return the first `most` texts, which may be sentences, and `and 4 more` for the others."""
    every = [*texts]
    others = [f"and {len(every) - most:,} more"] if len(every) > most else []
    return every[:most] + others
