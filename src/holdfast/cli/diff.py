"""`holdfast diff A B`: the differences between two steps, whatever layouts they were saved under."""

from __future__ import annotations

from typing import Annotated

from holdfast.cli.options import Argument, Option, ShowAll
from holdfast.cli.screen import Result

EXAMPLES = (
    "holdfast diff runs/gpt@1000 runs/gpt@2000",
    "holdfast diff runs/gpt dcp:runs/old --only 'model.*'",
)


def run(
    a: Annotated[str, Argument("A[@STEP]", "One step.")],
    b: Annotated[str, Argument("B[@STEP]", "The other.")],
    only: Annotated[str | None, Option("Names to compare.", "PATTERN")] = None,
    show_all: ShowAll = False,
) -> Result:
    """Compare values, names, shapes and extras of two steps.  Exit 1 if anything differs.

    Weights come first. Relative L2 is the norm of the difference divided by the larger norm of the two: 0
    for equal tensors, about 1 for unrelated ones.
    """
    from holdfast.cli.work import diff

    return diff.run(a, b, only, show_all)


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("diff")
