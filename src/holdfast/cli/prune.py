"""`holdfast prune URL`: delete the steps that need not be kept."""

from __future__ import annotations

import re

from holdfast.base.arguments import MAX_STEP, count_of, unfit
from holdfast.base.errors import UsageError
from holdfast.cli.options import own_root
from holdfast.cli.screen import Result, say, table
from holdfast.cli.words import bad, dim, good, many, size
from holdfast.core.checkpoint.listing import Step, survey_root
from holdfast.core.checkpoint.names import Saved
from holdfast.core.checkpoint.notes import read_notes
from holdfast.core.checkpoint.pruning import prunable, prune, seconds_in
from holdfast.core.checkpoint.tidying import Keep
from holdfast.core.store import open_store
from holdfast.tiers.records.log import leading, tidy_log


def run(
    url: str,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: str | None,
    keep_newer: str | None,
    *,
    dry_run: bool,
) -> Result:
    """See `holdfast.cli.verbs`."""
    if (keep_last, keep_every, keep_best, keep_newer) == (None, None, None, None):
        hint = "--keep-last N, --keep-every N, --keep-best METRIC:N, --keep-newer TIME, or several"
        raise UsageError("no option says what to keep", hint=hint)
    for option, n in (("--keep-last", keep_last), ("--keep-every", keep_every)):
        if n is not None:
            count_of(n, "prune", option, most=MAX_STEP)
    if keep_newer is not None:
        seconds_in(keep_newer, "prune", "--keep-newer")
    best = None if keep_best is None else _best(keep_best)
    keep = Keep(last=keep_last, every=keep_every, best=best, newer=keep_newer)
    store = own_root(url, "holdfast only reads", "delete it with the tools of what wrote it")
    steps = survey_root(store).steps
    sound = [Saved(s.run, s.step) for s in steps if s.problem is None]
    spare = {leading(store, sound)} if sound else set()
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


def _best(text: str) -> tuple[str, int, str]:
    """`loss:3`, `accuracy:3:max`."""
    match = re.fullmatch(r"(.+?):(\d{1,9})(?::(min|max))?", text)
    if match is None or not int(match[2]):
        what = "METRIC:N, such as loss:3, or METRIC:N:max"
        raise unfit("prune", "--keep-best", text, what, typed=False)
    return match[1], int(match[2]), match[3] or "min"


def _show(steps: tuple[Step, ...], gone: list[int], dry_run: bool, freed: int, url: str) -> None:
    if not steps:
        say(f"no steps in {url}")
        return
    verb, pinned = "would go" if dry_run else "deleted", read_notes(open_store(url)).pinned
    rows = [
        (
            str(s.step),
            size(s.manifest.total_bytes) if s.manifest else "?",
            bad(verb) if s.step in gone else good("stays"),
            dim(s.problem or ", ".join(pinned.get(s.step, ()))),
        )
        for s in steps
    ]
    table((">step", ">size", "", ""), rows, indent=0)
    freed_text = f"{size(freed)} {'would be freed' if dry_run else 'freed'}"
    say(f"{many(len(gone), 'step')} {verb}, {freed_text}")


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("prune")
