"""`holdfast prune URL`: delete the steps that need not be kept."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.arguments import count_of
from holdfast.checkpoint.listing import Step, survey
from holdfast.checkpoint.names import Saved
from holdfast.checkpoint.tidying import Keep, prunable, prune
from holdfast.cli.screen import AsJson, Root, bad, dim, good, many, print_json, say, size, table
from holdfast.delta.log import newest_history, open_log, tidy_log
from holdfast.errors import UsageError
from holdfast.interop.detect import detect
from holdfast.store import Store, open_store

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
    """Delete steps that neither option keeps.  The newest good step always stays, and so does the one from
    which records lead to the newest state.
    """
    if keep_last is None and keep_every is None:
        raise UsageError("nothing says what to keep", hint="--keep-last N, --keep-every N, or both")
    for option, n in (("--keep-last", keep_last), ("--keep-every", keep_every)):
        if n is not None:
            count_of(n, "prune", option)
    keep = Keep(last=keep_last, every=keep_every)
    foreign = detect(url)
    if foreign is not None:
        raise UsageError(
            f"{url} is a {foreign} checkpoint, which holdfast only reads",
            hint="delete it with the tools of what wrote it",
        )
    store = open_store(url)
    steps = survey(store).steps
    spare = _leading(store, steps)
    gone = prunable(store, keep, spare) if dry_run else prune(store, keep, spare=spare)
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


def _leading(store: Store, steps: tuple[Step, ...]) -> set[int]:
    """The good step that a restart begins with: after a run went back, an older one than the newest."""
    good = [Saved(s.run, s.step) for s in steps if s.problem is None]
    return {newest_history(open_log(store)[0], good)[0].step} if good else set()


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


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("prune")
