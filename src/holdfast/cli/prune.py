"""`holdfast prune URL`: delete the steps that need not be kept."""

from __future__ import annotations

from typing import Annotated

from holdfast.arguments import count_of
from holdfast.checkpoint.listing import Step, survey
from holdfast.checkpoint.names import Saved
from holdfast.checkpoint.tidying import Keep, prunable, prune
from holdfast.cli.options import Option, Root, own_root
from holdfast.cli.screen import Result, say, table
from holdfast.cli.words import bad, dim, good, many, size
from holdfast.delta.log import newest_history, open_log, tidy_log
from holdfast.errors import UsageError
from holdfast.store import Store


def run(
    url: Root,
    keep_last: Annotated[int | None, Option("Keep the newest N steps.", "N")] = None,
    keep_every: Annotated[int | None, Option("Keep every multiple of N.", "N")] = None,
    dry_run: Annotated[bool, Option("Only say what would go.")] = False,
) -> Result:
    """Delete steps that neither option keeps.  The newest good step always stays, and so does the one from
    which records lead to the newest state.
    """
    if keep_last is None and keep_every is None:
        raise UsageError("nothing says what to keep", hint="--keep-last N, --keep-every N, or both")
    for option, n in (("--keep-last", keep_last), ("--keep-every", keep_every)):
        if n is not None:
            count_of(n, "prune", option)
    keep = Keep(last=keep_last, every=keep_every)
    store = own_root(url, "holdfast only reads", "delete it with the tools of what wrote it")
    steps = survey(store).steps
    spare = _leading(store, steps)
    gone = prunable(store, keep, spare) if dry_run else prune(store, keep, spare=spare)
    if not dry_run:
        tidy_log(store)
    freed = sum(s.manifest.total_bytes for s in steps if s.step in gone and s.manifest)
    stay = [s.step for s in steps if s.step not in gone]
    return Result(
        lambda: {"url": store.url, "dry_run": dry_run, "gone": gone, "kept": stay,
                 "freed_bytes": freed},
        lambda: _show(steps, gone, dry_run, freed, store.url),
    )  # fmt: skip


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
    freed_text = f"{size(freed)} {'would be freed' if dry_run else 'freed'}"
    say(f"{many(len(gone), 'step')} {verb}, {freed_text}")


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("prune")
