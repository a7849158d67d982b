"""`holdfast log URL`: the recorded steps, and the full steps from which they can be replayed."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.cli.options import own_root
from holdfast.cli.screen import Result, say, table
from holdfast.cli.words import bad, dim, good, many, size
from holdfast.core.checkpoint.names import committed
from holdfast.core.store import Store
from holdfast.formats.read.detect import near_path
from holdfast.tiers.records.log import Log, RecordedStep, open_log
from holdfast.tiers.records.segment import Identity

_COLUMNS = (">run", ">steps", ">by", ">size", "lead on from", "replayed from")


@dataclass(frozen=True)
class Stretch:
    """Consecutive records."""

    run: int
    first: int
    last: int
    ranks: int
    bytes: int
    parent: Identity
    base: int | None
    """The nearest full step from which the records can be replayed."""
    history: bool
    """True if the records cannot be replayed, but a restart takes a newer step anyway: nothing is lost."""


def run(url: str) -> Result:
    """See `holdfast.cli.verbs`."""
    store = own_root(url, "has no records")
    log, damaged = open_log(store)
    found = _stretches(log, store)
    instead = None if found else near_path(url)
    is_bad = instead or damaged or any(one.base is None and not one.history for one in found)
    return Result(
        lambda: {"url": store.url, "records": found, "damaged": damaged},
        lambda: _show(found, damaged, store.url, instead),
        int(bool(is_bad)),
    )


def _stretches(log: Log, store: Store) -> list[Stretch]:
    saved = sorted(committed(store), key=lambda s: s.step)
    led: dict[Identity, int] = {}
    for base in saved:
        led |= {step.identity: base.step for step in log.after((base.run, base.step))}
    newest = max([*led, *((s.run, s.step) for s in saved)], default=(0, 0))
    out: list[list[RecordedStep]] = []
    for step in sorted(log.steps.values(), key=lambda s: s.identity):
        before = out[-1][-1] if out else step
        goes_on = step.parent == before.identity and step.world == before.world
        if out and goes_on and (step.identity in led) == (before.identity in led):
            out[-1].append(step)
        else:
            out.append([step])
    return [
        Stretch(
            part[0].run, part[0].step, part[-1].step, part[0].world,
            sum(r.bytes for s in part for _, r in s.records.values()),
            part[0].parent, led.get(part[-1].identity),
            part[-1].identity not in led and part[-1].identity <= newest,
        )
        for part in out
    ]  # fmt: skip


def _show(found: list[Stretch], damaged: list[str], url: str, hint: str | None) -> None:
    if not found:
        say(f"no records in {url}" + (f" ({hint})" if hint else ""))
    rows = [
        (
            str(one.run),
            f"{one.first} to {one.last}" if one.last > one.first else str(one.first),
            many(one.ranks, "rank"),
            size(one.bytes),
            f"step {one.parent[1]} of run {one.parent[0]}",
            _from(one),
        )
        for one in found
    ]
    if rows:
        table(_COLUMNS, rows, indent=0)
    for key in damaged:
        say(bad("damaged: ") + dim(key))


def _from(one: Stretch) -> str:
    if one.base is not None:
        return good(f"step {one.base}")
    if one.history:
        return dim("nowhere: history, a restart takes a newer full step")
    return bad("nowhere: no full step leads to them")


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("log")
