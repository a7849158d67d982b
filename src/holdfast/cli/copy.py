"""`holdfast copy URL[@STEP] DST`: copy steps, byte for byte, into another root."""

from __future__ import annotations

import time
from dataclasses import dataclass

from holdfast.base.errors import (
    Exists,
    FormatError,
    HoldfastError,
    NotFound,
    NotRecoverable,
    UsageError,
)
from holdfast.cli.options import own_root
from holdfast.cli.screen import Result, progress, say
from holdfast.cli.verbs import FORMATS
from holdfast.cli.words import bad, dim, good, many, size
from holdfast.core.checkpoint.names import committed, read_manifest
from holdfast.core.checkpoint.notes import carry, read_notes
from holdfast.core.checkpoint.recorded import segments
from holdfast.core.checkpoint.transfer import Transferred, transfer
from holdfast.core.checkpoint.unproved import newest_step
from holdfast.core.store import Store, open_store
from holdfast.formats.read.addresses import located
from holdfast.formats.read.detect import near_path, split_format
from holdfast.tiers.records.log import leading
from holdfast.tiers.records.transfer import TransferredLog, transfer_log


@dataclass
class CopiedStep:
    """The outcome for one step."""

    step: int
    outcome: str
    """`copied`, `there already`, or `failed`; with `--dry-run`, `missing` instead of `copied`."""
    num_files: int = 0
    num_copied: int = 0
    bytes: int = 0
    problem: str | None = None


@dataclass
class Copied:
    """The outcome of the whole command."""

    source: str
    target: str
    dry_run: bool
    steps: list[CopiedStep]
    records: TransferredLog | None
    labels: list[str]
    """Labels that pin the copied steps in the target too."""
    labels_left: list[str]
    """Labels that name another step in the target, and were not moved."""
    num_records_left: int
    """Files of records that lead on from the step, and were not asked for."""
    seconds: float


def run(source: str, target: str, every: bool, log: bool, dry_run: bool) -> Result:
    """See `holdfast.cli.verbs`."""
    began = time.perf_counter()
    store, into, steps = _both(source, target, every)
    done = [_copy(store, into, step, dry_run, go_on=every) for step in steps]
    since = 0 if every else steps[0]
    records, left = None, 0
    if every or log:
        records = _copy_records(store, into, since, dry_run)
    else:
        left = len(segments(store, since))
    labels, labels_left = _copy_notes(store, into, done, dry_run)
    seconds = time.perf_counter() - began
    made = Copied(store.url, into.url, dry_run, done, records, labels, labels_left, left, seconds)
    is_bad = any(one.problem for one in done) or bool(records and records.problems)
    return Result(lambda: made, lambda: _show(made), int(is_bad))


def _both(source: str, target: str, every: bool) -> tuple[Store, Store, list[int]]:
    """Return the two stores, and the steps to copy, newest first."""
    url, step = located(source)
    if step is not None and every:
        raise UsageError(
            f"{source} names one step, and --all means every step", hint="give one of them"
        )
    store = own_root(
        url,
        "copy leaves as it is",
        "`holdfast convert` writes it as a step; or copy its files by other tools",
    )
    prefix, path = split_format(target)
    if prefix:
        what = f"{target} names a {prefix} checkpoint; copy keeps holdfast's own format"
        other = f", or `holdfast convert --to {prefix}`" if prefix in FORMATS.split(", ") else ""
        raise UsageError(what, hint=f"give the path {path!r}{other}")
    into = open_store(target)
    if into.url == store.url:
        raise UsageError(f"{target} is where the steps are already", hint="give another root")
    if step is not None:
        return store, into, [step]
    saved = committed(store)
    try:
        newest_step(saved, store.url)
    except NotRecoverable as error:
        error.hint = near_path(url) or error.hint
        raise
    if every:
        return store, into, [s.step for s in reversed(saved)]
    return store, into, [leading(store, saved)]


def _copy(store: Store, into: Store, step: int, dry_run: bool, *, go_on: bool) -> CopiedStep:
    """Copy a step; `go_on`: return a problem in the result instead of raising it."""
    try:
        with progress(f"copying step {step}", _bytes(store, step)) as told:
            made = transfer(store, into, step, dry_run=dry_run, progress=told)
    except (FormatError, NotFound, Exists) as error:
        if not go_on:
            raise
        return CopiedStep(step, "failed", problem=error.message)
    return CopiedStep(step, _outcome(made, dry_run), made.num_files, made.num_copied, made.bytes)


def _outcome(made: Transferred, dry_run: bool) -> str:
    if not made.is_new and not made.num_copied:
        return "there already"
    return "missing" if dry_run else "copied"


def _bytes(store: Store, step: int) -> int:
    try:
        return read_manifest(store, step).total_bytes
    except HoldfastError:
        return 0  # the copy reports the problem


def _copy_records(store: Store, into: Store, since: int, dry_run: bool) -> TransferredLog:
    with progress("copying records", 0) as told:
        return transfer_log(store, into, since, dry_run=dry_run, progress=told)


def _copy_notes(
    store: Store, into: Store, done: list[CopiedStep], dry_run: bool
) -> tuple[list[str], list[str]]:
    """Copy labels and metrics of the copied steps.  Labels in the target are not moved."""
    there = {copied.step for copied in done if copied.problem is None}
    if dry_run:
        return [], []
    return carry(read_notes(store), into, there, replace=False)


def _show(made: Copied) -> None:
    for one in made.steps:
        if one.problem is not None:
            say(f"{bad('failed')}  step {one.step}: {one.problem}")
            continue
        files = f"{one.num_copied:,} of {many(one.num_files, 'file')}, {size(one.bytes)}"
        text = "" if one.outcome == "there already" else f": {files}"
        say(f"{good(one.outcome)}  step {one.step}{text}")
    if made.labels:
        say(dim(f"  pinned in DST too: {', '.join(made.labels)}"))
    if made.labels_left:
        say(f"  labels of another step in DST, not moved: {', '.join(made.labels_left)}")
    if made.records is not None:
        _show_records(made.records, made.dry_run)
    if made.num_records_left:
        say(
            dim(
                f"  {many(made.num_records_left, 'file')} of records lead on from it: --log copies them"
            )
        )
    _show_total(made)


def _show_records(records: TransferredLog, dry_run: bool) -> None:
    files = f"{records.num_copied:,} of {many(records.num_files, 'file')}, {size(records.bytes)}"
    if records.num_copied:
        say(f"{good('missing' if dry_run else 'copied')}  records: {files}")
    elif records.num_files:
        say(f"{good('there already')}  records")
    for key, problem in records.problems.items():
        say(f"{bad('failed')}  {key}: {problem}")


def _show_total(made: Copied) -> None:
    num_bytes = sum(one.bytes for one in made.steps) + (made.records.bytes if made.records else 0)
    if made.dry_run:
        say(f"{size(num_bytes)} would be copied to {made.target}")
    elif num_bytes:
        speed = size(num_bytes / max(made.seconds, 1e-9))
        say(
            f"every chunk compared with its digest: {size(num_bytes)} in {made.seconds:.1f} s, {speed}/s"
        )
    elif not any(one.problem for one in made.steps):
        say(f"{made.target} has everything")


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("copy")
