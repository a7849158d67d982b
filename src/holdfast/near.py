"""Near misses: names that the user may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def near(name: str, known: Iterable[str], most: int = 3) -> str | None:
    """`did you mean a, b?`, or None.  Bounded work however many names there are."""
    names = list(known)
    tail = name.rsplit(".", 1)[-1]
    if len(names) > 2000:
        names = [n for n in names if n.rsplit(".", 1)[-1] == tail][:2000] or names[:2000]
    found = get_close_matches(name, names, most, 0.5)
    return f"did you mean {', '.join(map(repr, found))}?" if found else None
