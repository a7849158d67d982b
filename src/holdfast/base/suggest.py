"""Suggestions for misspelt names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase


def did_you_mean(name: str, known: Iterable[str], most: int = 3) -> str | None:
    """Return `did you mean 'a', 'b'?`, or None.  Searches at most 2000 names."""
    names = list(known)
    tail = name.rsplit(".", 1)[-1]
    if len(names) > 2000:
        names = [n for n in names if n.rsplit(".", 1)[-1] == tail][:2000] or names[:2000]
    close = get_close_matches(name, names, most, 0.5)
    return f"did you mean {', '.join(map(repr, close))}?" if close else None


def matching_nothing(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the patterns that match no name."""
    known = list(names)
    return [p for p in patterns if not any(fnmatchcase(name, p) for name in known)]


def did_you_mean_pattern(pattern: str, names: Iterable[str]) -> str | None:
    """Return `did you mean 'model.*'?` for a pattern that matches no name, or None.

    Candidates are the names, and prefixes of names at the pattern's depth followed by `.*`.
    """
    known = list(dict.fromkeys(names))
    if any(c in pattern for c in "*?["):
        depth = pattern.count(".") or 1
        begins = dict.fromkeys(
            ".".join(n.split(".")[:depth]) for n in known if n.count(".") >= depth
        )
        known = [f"{begin}.*" for begin in begins] + known
    return did_you_mean(pattern, known)
