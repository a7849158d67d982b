"""`holdfast diff A B`: what differs between two steps, whatever layouts they were saved under."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Annotated, Any

from holdfast.checkpoint.diffing import Difference, compare, total_bytes
from holdfast.checkpoint.opened import Checkpoint
from holdfast.cli.leaves import in_few_lines
from holdfast.cli.options import Argument, Option, ShowAll
from holdfast.cli.screen import Result, heading, progress, say, table
from holdfast.cli.targets import opened
from holdfast.cli.words import dim, good, many, size

MOST = 20


def run(
    a: Annotated[str, Argument("A[@STEP]", "One step.")],
    b: Annotated[str, Argument("B[@STEP]", "The other.")],
    only: Annotated[str | None, Option("Names to compare.", "PATTERN")] = None,
    show_all: ShowAll = False,
) -> Result:
    """Compare names, shapes, values and extras of two steps.  Exit 1 if anything differs."""
    x, y = opened(a), opened(b)
    with progress("comparing", total_bytes(x, y, only)) as done:
        found = compare(x, y, only=only, progress=done)
    head = {"a": _label(x), "b": _label(y), "identical": found.identical}
    return Result(
        lambda: head | _plain(found),
        lambda: _show(found, x, y, math.inf if show_all else MOST),
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
    for letter, names in (("a", found.only_a), ("b", found.only_b)):
        if names:
            heading(f"Only in {letter}: {many(len(names), 'tensor')}")
            _table(("name",), [(n,) for n in names], most)
    if found.kinds:
        heading(f"Of another shape or dtype: {many(len(found.kinds), 'tensor')}")
        _table(("name", "a", "b"), found.kinds, most)
    if found.values:
        _show_values(found, most)
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
    heading(f"Values: {many(len(found.values), 'tensor')} differ")
    worst = sorted(found.values, key=lambda v: -v.max_rel)
    rows = [
        (
            v.name,
            f"{v.num_differing:,} of {v.size:,}",
            _number(v.max_abs),
            _number(v.max_rel),
            v.num_nan or "",
        )
        for v in worst
    ]
    _table(("name", ">differ", ">max |a-b|", ">max relative", ">NaN in one"), rows, most)


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.3g}"


def _table(columns: tuple[str, ...], rows: list[Any], most: float) -> None:
    shown = rows if len(rows) <= most else rows[: int(most)]
    table(columns, shown)
    if len(rows) > len(shown):
        say(dim(f"  … {len(rows) - len(shown):,} more (--all lists them)"))


def _plain(found: Difference) -> dict[str, Any]:
    row = asdict(found)
    for v in row["values"]:
        for name in ("max_abs", "max_rel"):
            v[name] = v[name] if math.isfinite(v[name]) else repr(v[name])
    row["kinds"] = [{"name": n, "a": x, "b": y} for n, x, y in found.kinds]
    row["extras"] = [{"path": p, "a": x, "b": y} for p, x, y in found.extras]
    return row


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("diff")
