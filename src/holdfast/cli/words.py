"""Numbers, times and ranks as verbs write them, and the colours of words."""

from __future__ import annotations

import calendar
import os
import re
import time
from collections.abc import Sequence

from holdfast.base.sizes import size_text as size

__all__ = [
    "age",
    "age_s",
    "and_more",
    "bad",
    "dim",
    "good",
    "many",
    "ranks_text",
    "shape_text",
    "size",
    "style",
]

_CODES = {"bold": 1, "dim": 2, "red": 91, "green": 32, "yellow": 33, "cyan": 36}
MARKS = "\ufdd0\ufdd1"
_OURS = os.urandom(8).hex()
STYLE = re.compile(f"{MARKS[0]}{_OURS}({'|'.join(map(str, (0, *_CODES.values())))}){MARKS[1]}")
"""A style in a text until that is written (`holdfast.cli.screen`): between marks, a number behind what no
text can have, for no other process knows it.  An escape sequence in a text is not ours."""


def style(text: str, *names: str) -> str:
    """A text in a colour, `bold` or `dim`; what is no terminal is written without."""
    before, after = MARKS[0] + _OURS, MARKS[1]
    return "".join(f"{before}{_CODES[name]}{after}" for name in names) + f"{text}{before}0{after}"


def good(text: str) -> str:
    return style(text, "green")


def bad(text: str) -> str:
    return style(text, "red")


def dim(text: str) -> str:
    return style(text, "dim")


def many(count: int, noun: str, plural: str | None = None) -> str:
    """`1 tensor`, `60,000 tensors`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def and_more(count: int, *, how: str = " (--all lists them)") -> str:
    """`… 622 more (--all lists them)`: the rows that a table leaves out."""
    return dim(f"… {count:,} more{how}")


def age_s(created: str) -> float | None:
    """Seconds since a time that a manifest states; None if it states none."""
    try:
        return max(time.time() - calendar.timegm(time.strptime(created, "%Y-%m-%dT%H:%M:%SZ")), 0)
    except ValueError:
        return None


def age(created: str) -> str:
    """`3 h ago`."""
    seconds = age_s(created)
    if seconds is None:
        return "?"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length or (unit == "min" and seconds >= length):
            return f"{int(seconds // length)} {unit} ago"
    return "just now" if seconds < 10 else f"{int(seconds)} s ago"


def shape_text(shape: Sequence[int]) -> str:
    return " × ".join(f"{n:,}" for n in shape) if shape else "scalar"


def ranks_text(ranks: Sequence[int], most: int = 6) -> str:
    """`0–3, 8`: runs of ranks; long lists are cut."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}–{b}" for a, b in runs]
    if len(texts) > most:
        return ", ".join(texts[: most - 1]) + f", … ({len(ranks):,} ranks)"
    return ", ".join(texts)
