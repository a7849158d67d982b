"""`holdfast verify URL[@STEP]`: check that a step is, byte for byte, what was saved."""

from __future__ import annotations

from dataclasses import asdict

from holdfast.base.errors import HoldfastError, NotRecoverable
from holdfast.cli.screen import Result, progress, say
from holdfast.cli.words import bad, dim, good, many, size
from holdfast.core.checkpoint.lone import root_at
from holdfast.core.checkpoint.names import committed, read_manifest, step_prefix
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.unproved import newest_step
from holdfast.core.checkpoint.verifying import Report, good_before, verify
from holdfast.core.store import Store
from holdfast.formats.read.addresses import located
from holdfast.formats.read.detect import detect, near_path, open_as
from holdfast.formats.read.verifying import ForeignReport, verify_foreign


def run(target: str, quick: bool) -> Result:
    """See `holdfast.cli.verbs`."""
    url, step = located(target)
    foreign = detect(url)
    if foreign is not None:
        return _verify_foreign(open_as(foreign, url, step), quick)
    store = root_at(url)
    unreadable: list[int] = []
    if step is None:
        saved = committed(store)
        try:
            step = newest_step(saved, store.url)
        except NotRecoverable as error:
            error.hint = near_path(url) or error.hint
            raise
        unreadable = [s.step for s in saved if not s.is_proved]
    _check_there(store, step)
    with progress(f"verifying step {step}", _bytes(store, step, quick)) as done:
        report = verify(store, step, quick=quick, progress=done)
    if not report.good:
        _check_there(store, step)  # a run that saves there may have deleted it meanwhile
    older = None if report.good else good_before(store, step, quick=quick)
    data = {"url": store.url, "good": report.good, **asdict(report), "older_good_step": older,
            "unreadable_steps": unreadable}  # fmt: skip
    is_good = report.good and not unreadable
    return Result(
        lambda: data, lambda: _show(report, store.url, older, unreadable), 0 if is_good else 1
    )


def _check_there(store: Store, step: int) -> None:
    """NotFound, with the existing steps, if a step does not exist."""
    if store.list(f"{step_prefix(step)}manifest.json") == []:
        read_manifest(store, step)


def _bytes(store: Store, step: int, quick: bool) -> int:
    try:
        return 0 if quick else sum(f.table for f in read_manifest(store, step).objects)
    except HoldfastError:
        return 0


def _show(report: Report, url: str, older: int | None, unreadable: list[int]) -> None:
    _show_outcome(report, "good", url)
    say(f"      {_depth(report)}" if report.good else _way_out(report, older))
    for step in unreadable:
        say(f"{bad('damaged')}  step {step}: its manifest cannot be read; restore() skips it")


def _show_outcome(report: Report | ForeignReport, praise: str, place: str) -> None:
    """Print whether a step is good, and each of its problems."""
    where = f"step {report.step} of {place}"
    if report.good:
        what = f"{many(report.num_tensors, 'tensor')} in {many(report.num_files, 'file')}"
        say(f"{good(praise)}  {where}: {what}")
        return
    say(f"{bad('damaged')}  {where}: {many(len(report.problems), 'problem')}")
    for p in report.problems:
        span = "" if p.start is None or p.stop is None else f"  bytes {p.start:,}..{p.stop:,}"
        say(f"  {p.key.removeprefix(step_prefix(report.step))}{span}", "yellow")
        say(f"    {p.message}")


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


# -- foreign checkpoints --------------------------------------------------------------------------


def _verify_foreign(checkpoint: Checkpoint, quick: bool) -> Result:
    total = 0 if quick else checkpoint.manifest.total_bytes
    with progress(f"verifying step {checkpoint.step}", total) as done:
        report = verify_foreign(checkpoint, quick=quick, progress=done)
    url = checkpoint.store.url
    lines = {"checked": checked(report), "not_checked": not_checked(report)}

    def show() -> None:
        _show_outcome(report, "no fault found", f"{url} ({report.format})")
        for mark, texts in lines.items():
            for text in texts:
                say(f"  {dim(f'{mark:<11}'.replace('_', ' '))}  {text}")

    data = {"url": url, "good": report.good, **asdict(report), **lines}
    return Result(lambda: data, show, 0 if report.good else 1)


def checked(report: ForeignReport) -> list[str]:
    """Return what was checked, in words."""
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
    """Return what was not checked, and why."""
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


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("verify")
