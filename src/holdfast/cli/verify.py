"""`holdfast verify URL[@STEP]`: is a step, byte for byte, what was saved?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from holdfast.checkpoint.names import committed, newest, read_manifest, step_prefix
from holdfast.checkpoint.verifying import Report, good_before, verify
from holdfast.cli.screen import (
    AsJson,
    Target,
    bad,
    good,
    many,
    print_json,
    progress,
    say,
    size,
    split_target,
)
from holdfast.errors import HoldfastError
from holdfast.store import Store, open_store

Quick = Annotated[
    bool,
    typer.Option("--quick", help="Lengths, manifest, headers and digest tables; not the data."),
]


def run(target: Target, quick: Quick = False, as_json: AsJson = False) -> None:
    """Check every digest of a step and that every tensor is covered.  Exit 1 if anything is wrong."""
    url, step = split_target(target)
    store = open_store(url)
    damaged = [] if step is not None else [s.step for s in committed(store) if s.run < 0]
    step = newest(store) if step is None else step
    if store.list(f"{step_prefix(step)}manifest.json") == []:
        read_manifest(store, step)  # raises NotFound, with the steps that there are
    with progress(f"verifying step {step}", _bytes(store, step, quick)) as done:
        report = verify(store, step, quick=quick, progress=done)
    older = None if report.good else good_before(store, step, quick=quick)
    if as_json:
        print_json(_plain(report, store.url, older, damaged))
    else:
        _show(report, store.url, older, damaged)
    if damaged or not report.good:
        raise typer.Exit(1)


def _bytes(store: Store, step: int, quick: bool) -> int:
    try:
        return 0 if quick else sum(f.table for f in read_manifest(store, step).files)
    except HoldfastError:
        return 0


def _show(report: Report, url: str, older: int | None, damaged: list[int]) -> None:
    what = f"{many(report.num_tensors, 'tensor')} in {many(report.num_files, 'file')}"
    if report.good:
        say(f"{good('good')}  step {report.step} of {url}: {what}")
        say(f"      {_depth(report)}")
    else:
        say(
            f"{bad('damaged')}  step {report.step} of {url}: {many(len(report.problems), 'problem')}"
        )
        prefix = step_prefix(report.step)
        for p in report.problems:
            where = "" if p.start is None else f"  bytes {p.start:,}..{p.stop:,}"
            say(f"  {p.key.removeprefix(prefix)}{where}", style="yellow")
            say(f"    {p.message}")
        say(_way_out(report, older))
    for step in damaged:
        say(f"{bad('damaged')}  step {step}: its manifest cannot be read; restore() passes it over")


def _depth(report: Report) -> str:
    if report.quick:
        return (
            "lengths, manifest, headers and digest tables checked; the data was not read (--quick)"
        )
    speed = report.bytes / max(report.seconds, 1e-9)
    return f"every digest checked: {size(report.bytes)} in {report.seconds:.2f} s, {size(speed)}/s"


def _way_out(report: Report, older: int | None) -> str:
    if older is None:
        return bad("No older step is good.")
    return f"Step {older} is good" + (" as far as --quick can tell." if report.quick else ".")


def _plain(report: Report, url: str, older: int | None, damaged: list[int]) -> dict[str, Any]:
    return {
        "url": url,
        "good": report.good,
        **asdict(report),
        "older_good_step": older,
        "unreadable_steps": damaged,
    }
