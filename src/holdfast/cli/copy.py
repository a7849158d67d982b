"""`holdfast copy URL[@STEP] DST`: copy steps, byte for byte, into another root."""

from __future__ import annotations

from typing import Annotated

from holdfast.cli.options import Argument, Option, TargetArgument
from holdfast.cli.screen import Result

EXAMPLES = (
    "holdfast copy runs/gpt s3://bucket/runs/gpt",
    "holdfast copy runs/gpt@1000 /archive/gpt --log",
    "holdfast copy runs/gpt /archive/gpt --all --dry-run",
)

Destination = Annotated[str, Argument("DST", "Root to copy into; made if missing.")]


def run(
    source: TargetArgument,
    target: Destination,
    every: Annotated[bool, Option("Copy every step, and the records.", name="--all")] = False,
    log: Annotated[bool, Option("Copy the records that lead on from the step, too.")] = False,
    dry_run: Annotated[bool, Option("Only say what would be copied.")] = False,
) -> Result:
    """Copy a step (the newest, or URL@STEP) into another root, byte for byte. After an interruption, run
    the same command again: it goes on with the next file. If a run has gone back, the newest step is the
    one that the run goes on from.

    URL and DST are paths or URLs. Each chunk is compared with its digest before it is written, and a step
    exists in DST once all of it is there. Files that DST has already are not copied again; another step of
    the same number stays. Exit 1 if a step is damaged or another step has its number.
    """
    from holdfast.cli.work import copy

    return copy.run(source, target, every, log, dry_run)


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("copy")
