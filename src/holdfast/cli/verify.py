"""`holdfast verify URL[@STEP]`: is a step, byte for byte, what was saved?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from holdfast.checkpoint.names import committed, newest_of, read_manifest, step_prefix
from holdfast.checkpoint.opened import Checkpoint
from holdfast.checkpoint.verifying import Report, good_before, verify
from holdfast.cli.screen import (
    AsJson,
    Target,
    bad,
    dim,
    good,
    many,
    print_json,
    progress,
    say,
    size,
    split_target,
)
from holdfast.errors import HoldfastError, NotRecoverable
from holdfast.interop.detect import detect, near_path, open_as
from holdfast.interop.verifying import ForeignReport, verify_foreign
from holdfast.store import Store, open_store

Quick = Annotated[
    bool,
    typer.Option("--quick", help="Lengths, manifest, headers and digest tables; not the data."),
]


def run(target: Target, quick: Quick = False, as_json: AsJson = False) -> None:
    """Check every digest of a step and that every tensor is covered.  Exit 1 if anything is wrong.

    Foreign checkpoints have no digests: what could be checked is said.
    """
    url, step = split_target(target)
    foreign = detect(url)
    if foreign is not None:
        _run_foreign(open_as(foreign, url, step), quick, as_json)
        return
    store = open_store(url)
    damaged = []
    if step is None:
        saved = committed(store)
        try:
            step = newest_of(saved, store.url)
        except NotRecoverable as error:
            error.hint = near_path(url) or error.hint
            raise
        damaged = [s.step for s in saved if not s.is_proved]
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


def _run_foreign(checkpoint: Checkpoint, quick: bool, as_json: bool) -> None:
    total = 0 if quick else checkpoint.manifest.total_bytes
    with progress(f"verifying step {checkpoint.step}", total) as done:
        report = verify_foreign(checkpoint, quick=quick, progress=done)
    if as_json:
        plain = {"url": checkpoint.store.url, "good": report.good, **asdict(report)}
        print_json(plain | {"checked": checked(report), "not_checked": not_checked(report)})
    else:
        _show_foreign(report, checkpoint.store.url)
    if not report.good:
        raise typer.Exit(1)


def _show_foreign(report: ForeignReport, url: str) -> None:
    what = f"{many(report.num_tensors, 'tensor')} in {many(report.num_files, 'file')}"
    where = f"step {report.step} of {url} ({report.format})"
    if report.good:
        say(f"{good('no fault found')}  {where}: {what}")
    else:
        say(f"{bad('damaged')}  {where}: {many(len(report.problems), 'problem')}")
        for p in report.problems:
            span = "" if p.start is None or p.stop is None else f"  bytes {p.start:,}..{p.stop:,}"
            say(f"  {p.key}{span}", style="yellow")
            say(f"    {p.message}")
    for mark, lines in (("checked", checked(report)), ("not checked", not_checked(report))):
        for line in lines:
            say(f"  {dim(f'{mark:<11}')}  {line}")


def checked(report: ForeignReport) -> list[str]:
    """Say what was checked, in words."""
    lines = ["parts cover every tensor once; headers and metadata are sound"]
    if report.quick:
        return [*lines, "every part is there in full length (its last byte was read)"]
    speed = f"{size(report.bytes)} in {report.seconds:.2f} s"
    lines.append(f"every part is there in full length and can be read: {speed}")
    if report.num_with_crc:
        lines.append(
            f"the CRC-32 of {many(report.num_with_crc, 'archive')} of torch.save, byte by byte"
        )
    if report.num_copies:
        lines.append(f"replicas of {many(report.num_copies, 'tensor')} are equal, bit by bit")
    return lines if report.good else lines[:1]


def not_checked(report: ForeignReport) -> list[str]:
    """Say what was not checked, and why."""
    if report.quick:
        return ["the data, its checksums and replicas (--quick)"]
    without = report.num_archives - report.num_with_crc
    if without:
        return [
            f"the data of {many(without, 'archive')}: torch was told to write no CRC-32, so a changed "
            "bit cannot be found"
        ]
    if not report.num_archives:
        return ["the data: this format keeps no digests, so a changed bit cannot be found"]
    return []


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


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("verify")
