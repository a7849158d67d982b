"""`holdfast log URL`: which steps are recorded, and where the records lead on from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import typer

from holdfast.checkpoint.names import committed
from holdfast.cli.screen import AsJson, Root, bad, dim, good, many, print_json, say, size, table
from holdfast.delta.log import Log, Step, open_log
from holdfast.store import Store, open_store


@dataclass(frozen=True)
class Stretch:
    """Records that follow each other."""

    run: int
    first: int
    last: int
    ranks: int
    bytes: int
    parent: tuple[int, int]
    base: int | None
    """The nearest full step from which they can be replayed."""


def run(url: Root, as_json: AsJson = False) -> None:
    """List the records of a log.  Exit 1 if some cannot be replayed, or if files are damaged."""
    store = open_store(url)
    log, damaged = open_log(store)
    found = _stretches(log, store)
    if as_json:
        rows = [asdict(one) for one in found]
        print_json({"url": store.url, "records": rows, "damaged": damaged})
    else:
        _show(found, damaged, store.url)
    if damaged or any(one.base is None for one in found):
        raise typer.Exit(1)


def _stretches(log: Log, store: Store) -> list[Stretch]:
    bases = {(s.run, s.step): s.step for s in committed(store)}
    led: dict[tuple[int, int], int] = {}
    for base, number in sorted(bases.items(), key=lambda item: item[1]):
        led |= {step.identity: number for step in log.after(base)}
    out: list[list[Step]] = []
    for step in sorted(log.steps.values(), key=lambda s: s.identity):
        if out and step.parent == out[-1][-1].identity and step.world == out[-1][-1].world:
            out[-1].append(step)
        else:
            out.append([step])
    return [
        Stretch(
            part[0].run, part[0].step, part[-1].step, part[0].world,
            sum(r.bytes for s in part for _, r in s.records.values()),
            part[0].parent, led.get(part[-1].identity),
        )
        for part in out
    ]  # fmt: skip


def _show(found: list[Stretch], damaged: list[str], url: str) -> None:
    if not found:
        say(f"no records in {url}")
    rows: list[Any] = [
        (
            str(one.run),
            f"{one.first} to {one.last}" if one.last > one.first else str(one.first),
            many(one.ranks, "rank"),
            size(one.bytes),
            f"step {one.parent[1]} of run {one.parent[0]}",
            bad("nowhere: no full step leads to them")
            if one.base is None
            else good(f"step {one.base}"),
        )
        for one in found
    ]
    if rows:
        columns = (">run", ">steps", ">by", ">size", "lead on from", "replayed from")
        table(columns, rows, indent=0)
    for key in damaged:
        say(bad("damaged: ") + dim(key))
