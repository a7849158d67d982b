"""`holdfast ls URL`: the steps of a root, and whether each is complete."""

from __future__ import annotations

from typing import Annotated

from holdfast.cli.options import Option, RootArgument
from holdfast.cli.screen import Result

EXAMPLES = (
    "holdfast ls runs/gpt",
    "holdfast ls runs/gpt --columns eval_accuracy,tensors",
    "holdfast ls s3://bucket/runs/gpt --json",
)


def run(
    url: RootArgument,
    columns: Annotated[
        str | None, Option("More columns: metrics, tensors, files.", "NAME,...")
    ] = None,
) -> Result:
    """List steps: size, age, and whether each is complete.  Exit 1 if any is not, or if there are none.

    The metric that the run keeps its best steps by is a column; --json has all metrics. Snapshots that the
    agent of this node holds in memory are listed below. Of a folder that is no root, checkpoints in it are
    listed.
    """
    from holdfast.cli.work import ls

    return ls.run(url, columns)


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("ls")
