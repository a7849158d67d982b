"""`holdfast prove -- COMMAND`: does a training that is killed go on exactly, and if not, what does not?"""

from __future__ import annotations

from typing import Annotated

from holdfast.cli.options import Argument, Option
from holdfast.cli.screen import Result

EXAMPLES = (
    "holdfast prove -- python train.py --root runs/gpt",
    "holdfast prove --ranks 1 -- torchrun --nproc-per-node 2 train.py --root r",
    'holdfast prove --state out --resume-with "--resume" -- python train.py',
)


def run(
    command: Annotated[
        list[str],
        Argument("-- COMMAND...", "What starts the training; one word is a line for the shell."),
    ],
    steps: Annotated[int, Option("Train up to this step of the optimizer.", "N")] = 20,
    kill_at: Annotated[int | None, Option("Kill after this step; default: at random.", "N")] = None,
    kill: Annotated[str, Option("Kill all ranks, or one: all, one.", "WHICH")] = "all",
    resume_with: Annotated[str, Option("Arguments that a restart needs besides.", "ARGS")] = "",
    ranks: Annotated[int | None, Option("Go on with N ranks, too.", "N")] = None,
    then: Annotated[str, Option("Go on with this command, too.", "COMMAND")] = "",
    state: Annotated[
        list[str] | None, Option("A folder that the training writes; may be repeated.", "DIR")
    ] = None,
    seed: Annotated[int | None, Option("Of the steps at which runs are killed.", "S")] = None,
    tolerance: Annotated[
        float | None, Option("Share of its way that a tensor may be off, if not bit-exact.", "T")
    ] = None,
    patience: Annotated[float, Option("Longest time between two steps.", "SECONDS")] = 300.0,
    keep: Annotated[bool, Option("Keep what the runs have written.")] = False,
) -> Result:
    """Run a training whole, killed and resumed, and name the first thing that differs.

    The script is not changed, whatever it saves with. Each run has its own empty copy of the folder after
    --root, and of those that --state names. Compared are parameters, gradients, optimizer states and
    settings, batches, losses, generators, averages and counters, at each step on each rank, by digests.

    Exit 0 if everything is bit for bit the same, 1 if something is not, 2 if it could not be found out.
    """
    from holdfast.cli.work import prove

    return prove.run(
        command=command, steps=steps, kill_at=kill_at, kill=kill, resume_with=resume_with, ranks=ranks,
        then=then, state=state or [], seed=seed, tolerance=tolerance, patience_s=patience, keep=keep,
    )  # fmt: skip


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("prove")
