"""`holdfast inspect URL[@STEP] [NAME]`: the contents of a step, or how one tensor is cut and stored."""

from __future__ import annotations

from typing import Annotated

from holdfast.cli.options import Argument, Option, ShowAll, TargetArgument
from holdfast.cli.screen import Result

EXAMPLES = (
    "holdfast inspect runs/gpt",
    "holdfast inspect runs/gpt@1000 'model.h.*.weight' --stats",
    "holdfast inspect runs/gpt meta.wandb_id",
)


def run(
    target: TargetArgument,
    name: Annotated[
        str | None, Argument("[NAME]", "A tensor, a pattern such as '*.bias', or an extra.")
    ] = None,
    stats: Annotated[bool, Option("Read tensors: mean, deviation, least, most, NaN, Inf.")] = False,
    show_all: ShowAll = False,
) -> Result:
    """Show the contents of a step; with NAME, draw how that tensor is cut, and show where its bytes lie, or
    print the value of that extra.

    An extra is named by its path: progress.epoch, optim.param_groups[0].lr.
    """
    from holdfast.cli.work import inspect

    return inspect.run(target, name, stats, show_all)


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("inspect")
