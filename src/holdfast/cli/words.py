"""Texts for numbers, times and ranks, and coloured words."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence

from holdfast.base.sizes import size_text
from holdfast.base.text import ago, time_of

size = size_text
_CODES = {"bold": 1, "dim": 2, "red": 91, "green": 32, "yellow": 33, "cyan": 36}
STYLE_MARKS = "\ufdd0\ufdd1"
_OURS = os.urandom(8).hex()
STYLE = re.compile(
    f"{STYLE_MARKS[0]}{_OURS}({'|'.join(map(str, (0, *_CODES.values())))}){STYLE_MARKS[1]}"
)
"""A style inside a text, until `holdfast.cli.screen` writes it: a random prefix and a number between marks.
No other process knows the prefix, so no text from a checkpoint can contain a style."""


def style(text: str, *names: str) -> str:
    """Return a text in a colour, `bold` or `dim`; styles are dropped if the output is not a terminal."""
    before, after = STYLE_MARKS[0] + _OURS, STYLE_MARKS[1]
    return "".join(f"{before}{_CODES[name]}{after}" for name in names) + f"{text}{before}0{after}"


def good(text: str) -> str:
    return style(text, "green")


def bad(text: str) -> str:
    return style(text, "red")


def dim(text: str) -> str:
    return style(text, "dim")


def many(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun: `1 tensor`, `60,000 tensors`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def and_more(count: int, *, how: str = " (--all lists them)") -> str:
    """`… 622 more (--all lists them)`: the rows that a table leaves out."""
    return dim(f"… {count:,} more{how}")


def age_s(created: str) -> float | None:
    """Return the seconds since the time in a manifest; None if it has none."""
    since = time_of(created)
    return None if since is None else max(time.time() - since, 0)


def age(created: str) -> str:
    """Return an age as a text: `3 h ago`."""
    seconds = age_s(created)
    return "?" if seconds is None else ago(seconds)


def shape_text(shape: Sequence[int]) -> str:
    return " × ".join(f"{n:,}" for n in shape) if shape else "scalar"


def ranks_text(ranks: Sequence[int], most: int = 6) -> str:
    """Return ranks as a text with ranges, `0–3, 8`; long lists are cut."""
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
