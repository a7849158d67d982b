"""Lists and times in messages: the first of many and how many there are besides; how long ago."""

from __future__ import annotations

import calendar
import time
from collections.abc import Iterable


def listed(names: Iterable[object], most: int = 3) -> str:
    """Return names in a row: `a, b, c and 4 more`."""
    every = [*map(str, names)]
    others = f" and {len(every) - most:,} more" if len(every) > most else ""
    return ", ".join(every[:most]) + others


def one_line(text: str, most: int = 200) -> str:
    """Return a text as one line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def time_of(created: str) -> float | None:
    """Return the time that a manifest states, in seconds since the epoch; None if it states none."""
    try:
        return calendar.timegm(time.strptime(created, "%Y-%m-%dT%H:%M:%SZ"))
    except ValueError:
        return None


def ago(seconds: float) -> str:
    """Return an age in words: `3 h ago`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length or (unit == "min" and seconds >= length):
            return f"{int(seconds // length)} {unit} ago"
    return "just now" if seconds < 10 else f"{int(seconds)} s ago"


def first_of(texts: Iterable[str], most: int) -> list[str]:
    """Return the first `most` texts, which may be sentences, and `and 4 more` for the others."""
    every = [*texts]
    others = [f"and {len(every) - most:,} more"] if len(every) > most else []
    return every[:most] + others
