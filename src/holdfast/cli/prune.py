"""`holdfast prune URL`: delete the steps that need not be kept."""

from __future__ import annotations

from typing import Annotated

from holdfast.cli.options import Option, RootArgument
from holdfast.cli.screen import Result

EXAMPLES = (
    "holdfast prune runs/gpt --keep-last 3 --dry-run",
    "holdfast prune runs/gpt --keep-last 1 --keep-best eval_loss:2",
    "holdfast prune runs/gpt --keep-every 10000 --keep-newer 2d",
)


def run(
    url: RootArgument,
    keep_last: Annotated[int | None, Option("Keep the newest N steps.", "N")] = None,
    keep_every: Annotated[int | None, Option("Keep every multiple of N.", "N")] = None,
    keep_best: Annotated[
        str | None, Option("Keep the best N by a metric.", "METRIC:N[:max]")
    ] = None,
    keep_newer: Annotated[str | None, Option("Keep newer steps (36h, 2d).", "TIME")] = None,
    dry_run: Annotated[bool, Option("Only show what would be deleted.")] = False,
) -> Result:
    """Delete steps that no option keeps.  Never deleted: the newest good step, the step from which records
    lead to the newest state, and pinned steps.
    """
    from holdfast.cli.work import prune

    return prune.run(url, keep_last, keep_every, keep_best, keep_newer, dry_run=dry_run)


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("prune")
