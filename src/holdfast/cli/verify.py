"""`holdfast verify URL[@STEP]`: check that a step is, byte for byte, what was saved."""

from __future__ import annotations

from typing import Annotated

from holdfast.cli.options import Option, TargetArgument
from holdfast.cli.screen import Result

EXAMPLES = (
    "holdfast verify runs/gpt",
    "holdfast verify runs/gpt@1000 --quick",
    "holdfast verify dcp:runs/old",
)
DEPTHS = "Lengths, manifest, headers and digest tables; not the data."


def run(target: TargetArgument, quick: Annotated[bool, Option(DEPTHS)] = False) -> Result:
    """Check every digest of a step, and that every tensor is covered.  Exit 1 if anything is wrong.

    Foreign checkpoints have no digests: the output lists what was checked and what was not.
    """
    from holdfast.cli.work import verify

    return verify.run(target, quick)


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("verify")
