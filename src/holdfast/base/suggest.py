"""Near misses: names that the user may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase


def did_you_mean(name: str, known: Iterable[str], most: int = 3) -> str | None:
    """`did you mean a, b?`, or None.  Bounded work however many names there are."""
    names = list(known)
    tail = name.rsplit(".", 1)[-1]
    if len(names) > 2000:
        names = [n for n in names if n.rsplit(".", 1)[-1] == tail][:2000] or names[:2000]
    found = get_close_matches(name, names, most, 0.5)
    return f"did you mean {', '.join(map(repr, found))}?" if found else None


def matching_nothing(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """The patterns that match none of the names."""
    known = list(names)
    return [p for p in patterns if not any(fnmatchcase(name, p) for name in known)]


def did_you_mean_pattern(pattern: str, names: Iterable[str]) -> str | None:
    """`did you mean 'model.*'?` for a pattern that matches none of the names, or None.

    Near are names, and patterns of all that begins as some names do, at the pattern's depth.
    """
    known = list(dict.fromkeys(names))
    if any(c in pattern for c in "*?["):
        depth = pattern.count(".") or 1
        begins = dict.fromkeys(
            ".".join(n.split(".")[:depth]) for n in known if n.count(".") >= depth
        )
        known = [f"{begin}.*" for begin in begins] + known
    return did_you_mean(pattern, known)
