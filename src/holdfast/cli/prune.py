"""`holdfast prune URL`: delete the steps that need not be kept."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.checkpoint.listing import Step, survey
from holdfast.checkpoint.tidying import Keep, prunable, prune
from holdfast.cli.screen import AsJson, Root, bad, dim, good, many, print_json, say, size, table
from holdfast.delta.log import tidy_log
from holdfast.errors import UsageError
from holdfast.interop.detect import detect
from holdfast.store import open_store

KeepLast = Annotated[
    int | None, typer.Option("--keep-last", metavar="N", help="Keep the newest N steps.")
]
KeepEvery = Annotated[
    int | None, typer.Option("--keep-every", metavar="N", help="Keep every multiple of N.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")]


def run(
    url: Root,
    keep_last: KeepLast = None,
    keep_every: KeepEvery = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Delete steps that neither option keeps.  The newest good step always stays."""
    if keep_last is None and keep_every is None:
        raise UsageError("nothing says what to keep", hint="--keep-last N, --keep-every N, or both")
    keep = Keep(last=keep_last, every=keep_every)
    foreign = detect(url)
    if foreign is not None:
        raise UsageError(
            f"{url} is a {foreign} checkpoint, which holdfast only reads",
            hint="delete it with the tools of what wrote it",
        )
    store = open_store(url)
    steps = survey(store).steps
    gone = prunable(store, keep) if dry_run else prune(store, keep)
    if not dry_run:
        tidy_log(store)
    freed = sum(s.manifest.total_bytes for s in steps if s.step in gone and s.manifest)
    if as_json:
        stay = [s.step for s in steps if s.step not in gone]
        print_json(
            {"url": store.url, "dry_run": dry_run, "gone": gone, "kept": stay, "freed_bytes": freed}
        )
        return
    _show(steps, gone, dry_run, freed, store.url)


def _show(steps: tuple[Step, ...], gone: list[int], dry_run: bool, freed: int, url: str) -> None:
    if not steps:
        say(f"no steps in {url}")
        return
    verb = "would go" if dry_run else "deleted"
    rows = [
        (
            str(s.step),
            size(s.manifest.total_bytes) if s.manifest else "?",
            bad(verb) if s.step in gone else good("stays"),
            dim(s.problem) if s.problem else "",
        )
        for s in steps
    ]
    table((">step", ">size", "", ""), rows, indent=0)
    what = "would be freed" if dry_run else "freed"
    say(f"{many(len(gone), 'step')} {verb}, {size(freed)} {what}")
