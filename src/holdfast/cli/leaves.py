"""Differences of extras as few lines: the leaves of one sequence, and of one value on many ranks, together.

One random generator of Python is 625 numbers, all of which change with the first number that is drawn:

    rank0.rng.python[1][0]   2147483648  2174204854         rank0.rng.python              624 values differ
    rank0.rng.python[1][1]   3539951191  4152560872    ->   rank0.rng.numpy[1], [2]  array, 623  array, 5
    ... 622 more

A few leaves keep their values, side by side; of many there is only the number.  Where lists hold dicts
(`param_groups[3].lr`), the same entry of many of them is one line: `param_groups[*].lr`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

Row = tuple[str, str, str]
"""A path, and its value in a and in b."""

FEW = 4
"""Most leaves that are shown with their values."""

_END = re.compile(r"((?:\[\d+\])+)$")
_INDEX = re.compile(r"\[\d+\]")
_RANK = re.compile(r"rank(\d+)(?=\.)")


def in_few_lines(rows: list[Row]) -> list[Row]:
    """The rows, those that belong together as one; in the order of the first of each."""
    counted = [(row, 1) for row in rows]
    for key, merged in ((_sequence, _one_sequence), (_entry, _one_entry), (_of_ranks, _all_ranks)):
        counted = _merge(counted, key, merged)
    return [row for row, _ in counted]


Counted = tuple[Row, int]
"""A row, and how many leaves it stands for."""


def _merge(
    counted: list[Counted],
    key: Callable[[str], str],
    merged: Callable[[str, list[Counted]], list[Counted]],
) -> list[Counted]:
    groups: dict[str, list[Counted]] = {}
    for one in counted:
        groups.setdefault(key(one[0][0]), []).append(one)
    return [m for name, g in groups.items() for m in (merged(name, g) if len(g) > 1 else g)]


def _number(count: int) -> str:
    return f"{count:,} values differ"


def _sequence(path: str) -> str:
    """The outermost sequence of plain values that a leaf is in."""
    return _END.sub("", path)


def _one_sequence(path: str, group: list[Counted]) -> list[Counted]:
    if len(group) > FEW:
        return [((path, "", _number(len(group))), len(group))]
    ends = [row[0][len(path) :] for row, _ in group]
    if any(not end for end in ends):
        return group
    a, b = (", ".join(row[side] for row, _ in group) for side in (1, 2))
    return [((path + ", ".join(ends), a, b), len(group))]


def _entry(path: str) -> str:
    """The same entry of all dicts of a list."""
    end = _END.search(path)
    stop = end.start() if end else len(path)
    return _INDEX.sub("[*]", path[:stop]) + path[stop:]


def _one_entry(path: str, group: list[Counted]) -> list[Counted]:
    if len(group) <= FEW:
        return group
    count = sum(n for _, n in group)
    values = {row[1:] for row, _ in group}
    if len(values) == 1 and count == len(group):
        a, b = values.pop()
        return [((path, a, f"{b}  ({count:,} times)"), count)]
    return [((path, "", _number(count)), count)]


def _of_ranks(path: str) -> str:
    """The same leaf of all ranks."""
    return _RANK.sub("rank*", path, count=1)


def _all_ranks(path: str, group: list[Counted]) -> list[Counted]:
    if len(group) <= FEW:
        return group
    count = sum(n for _, n in group)
    return [((path, "", f"{_number(count)}, on {len(group):,} ranks"), count)]
