"""`holdfast diff A B`: the differences between two steps, whatever layouts they were saved under.

Differences of extras are summarised: one line for the leaves of a sequence, or for a value on many ranks.
A random generator of Python, for example, is 625 numbers, all of which change with the first draw:

    rank0.rng.python[1][0]   2147483648  2174204854         rank0.rng.python              624 values differ
    rank0.rng.python[1][1]   3539951191  4152560872    ->   rank0.rng.numpy[1], [2]  array, 623  array, 5
    ... 622 more

Up to `_MOST_LEAVES` leaves are shown with their values; of more, only their number.  In lists of dicts
(`param_groups[3].lr`), the same entry of many dicts is one line: `param_groups[*].lr`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from holdfast.cli.screen import Result, heading, progress, say, table
from holdfast.cli.words import and_more, dim, good, many, size
from holdfast.core.checkpoint.diffing import Difference, compare_checkpoints, total_bytes
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.format.manifest import MODEL_STATES
from holdfast.formats.looking import open as open_checkpoint

_MOST_ROWS = 20


def run(a: str, b: str, only: str | None, show_all: bool) -> Result:
    """See `holdfast.cli.verbs`."""
    x, y = open_checkpoint(a), open_checkpoint(b)
    with progress("comparing", total_bytes(x, y, only)) as done:
        found = compare_checkpoints(x, y, only=only, progress=done)
    head = {"a": _label(x), "b": _label(y), "identical": found.identical}
    return Result(
        lambda: head | _plain(found),
        lambda: _show(found, x, y, math.inf if show_all else _MOST_ROWS),
        0 if found.identical else 1,
    )


def _label(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.store.url}@{checkpoint.step}"


def _origin(c: Checkpoint) -> str:
    if c.format != "holdfast":
        return f"{c.format} checkpoint"
    return f"mesh {c.mesh}, run {c.manifest.run}"


def _show(found: Difference, a: Checkpoint, b: Checkpoint, most: float) -> None:
    for letter, c in (("a", a), ("b", b)):
        say(f"{dim(letter)}  {_label(c)}  {dim(_origin(c))}")
    _show_values(found, most)
    for letter, names in (("a", found.only_a), ("b", found.only_b)):
        if names:
            heading(f"Only in {letter}: {many(len(names), 'tensor')}")
            _table(("name",), [(n,) for n in names], most)
    if found.kinds:
        heading(f"Of another shape or dtype: {many(len(found.kinds), 'tensor')}")
        _table(("name", "a", "b"), found.kinds, most)
    if found.extras:
        rows = found.extras if most == math.inf else in_few_lines(found.extras)
        heading(f"Extras: {many(len(rows), 'difference')}")
        _table(("path", "a", "b"), rows, most)
    say()
    if found.num_equal or not found.values:
        compared = f"{size(found.bytes)} of each compared"
        say(f"{many(found.num_equal, 'tensor')} bit-identical, {compared}")
    for note in found.notes:
        say(dim(note))
    if found.identical:
        say(good("no difference"))


def _show_values(found: Difference, most: float) -> None:
    """Show the tensors whose values differ: weights first, then each state of optimizers, the largest
    differences of each first."""
    weights = [v for v in found.values if v.state in MODEL_STATES]
    states = [v for v in found.values if v.state not in MODEL_STATES]
    order = [*dict.fromkeys(v.state for v in states)]
    for title, some in (("Weights", weights), ("Optimizer states", states)):
        if not some:
            continue
        some.sort(key=lambda v: (order.index(v.state) if v.state in order else -1, -v.rel_l2))
        heading(f"{title}: {many(len(some), 'tensor')} differ")
        columns = ["name", ">relative L2", ">max |a-b|", ">elements that differ"]
        nan = [">NaN in one"] if any(v.num_nan for v in some) else []
        rows = [
            (
                v.name,
                _number(v.rel_l2),
                _number(v.max_abs),
                f"{v.num_differing:,} of {v.size:,}",
                *([v.num_nan or ""] if nan else []),
            )
            for v in some
        ]
        _table((*columns, *nan), rows, most)


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.3g}"


def _table(columns: tuple[str, ...], rows: list[Any], most: float) -> None:
    shown = rows if len(rows) <= most else rows[: int(most)]
    table(columns, shown)
    if len(rows) > len(shown):
        say(f"  {and_more(len(rows) - len(shown))}")


def _plain(found: Difference) -> dict[str, Any]:
    row = asdict(found)
    for v in row["values"]:
        for name in ("max_abs", "rel_l2"):
            v[name] = v[name] if math.isfinite(v[name]) else repr(v[name])
    row["kinds"] = [{"name": n, "a": x, "b": y} for n, x, y in found.kinds]
    row["extras"] = [{"path": p, "a": x, "b": y} for p, x, y in found.extras]
    return row


# -- extras in few lines --------------------------------------------------------------------------


_Row = tuple[str, str, str]
"""A path, and its value in a and in b."""

_MOST_LEAVES = 4
"""Largest number of leaves that are shown with their values."""

_END = re.compile(r"((?:\[\d+\])+)$")
_INDEX = re.compile(r"\[\d+\]")
_RANK = re.compile(r"rank(\d+)(?=\.)")


def in_few_lines(rows: list[_Row]) -> list[_Row]:
    """Return the rows, with related rows merged, each at the place of the first of them."""
    counted = [(row, 1) for row in rows]
    for key, merged in ((_sequence, _one_sequence), (_entry, _one_entry), (_of_ranks, _all_ranks)):
        counted = _merge(counted, key, merged)
    return [row for row, _ in counted]


_Counted = tuple[_Row, int]
"""A row, and how many leaves it stands for."""


def _merge(
    counted: list[_Counted],
    key: Callable[[str], str],
    merged: Callable[[str, list[_Counted]], list[_Counted]],
) -> list[_Counted]:
    groups: dict[str, list[_Counted]] = {}
    for one in counted:
        groups.setdefault(key(one[0][0]), []).append(one)
    return [m for name, g in groups.items() for m in (merged(name, g) if len(g) > 1 else g)]


def _differing(count: int) -> str:
    return f"{count:,} values differ"


def _sequence(path: str) -> str:
    """Return the path of the outermost sequence of plain values around a leaf."""
    return _END.sub("", path)


def _one_sequence(path: str, group: list[_Counted]) -> list[_Counted]:
    if len(group) > _MOST_LEAVES:
        return [((path, "", _differing(len(group))), len(group))]
    ends = [row[0][len(path) :] for row, _ in group]
    if any(not end for end in ends):
        return group
    a, b = (", ".join(row[side] for row, _ in group) for side in (1, 2))
    return [((path + ", ".join(ends), a, b), len(group))]


def _entry(path: str) -> str:
    """Return the path with `[*]` for the number of a dict in a list."""
    end = _END.search(path)
    stop = end.start() if end else len(path)
    return _INDEX.sub("[*]", path[:stop]) + path[stop:]


def _one_entry(path: str, group: list[_Counted]) -> list[_Counted]:
    if len(group) <= _MOST_LEAVES:
        return group
    count = sum(n for _, n in group)
    values = {row[1:] for row, _ in group}
    if len(values) == 1 and count == len(group):
        a, b = values.pop()
        return [((path, a, f"{b}  ({count:,} times)"), count)]
    return [((path, "", _differing(count)), count)]


def _of_ranks(path: str) -> str:
    """Return the path with `rank*` for the number of a rank."""
    return _RANK.sub("rank*", path, count=1)


def _all_ranks(path: str, group: list[_Counted]) -> list[_Counted]:
    if len(group) <= _MOST_LEAVES:
        return group
    count = sum(n for _, n in group)
    return [((path, "", f"{_differing(count)}, on {len(group):,} ranks"), count)]


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("diff")
