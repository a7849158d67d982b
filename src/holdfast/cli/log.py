"""`holdfast log URL`: the recorded steps, and the full steps from which they can be replayed."""

from __future__ import annotations

from holdfast.cli.options import RootArgument
from holdfast.cli.screen import Result

EXAMPLES = (
    "holdfast log runs/gpt",
    "holdfast log runs/gpt --json",
)


def run(url: RootArgument) -> Result:
    """List the records of a root.

    Exit 1 if files are damaged, if records that are newer than every full step cannot be replayed, or if
    there is no such root.
    """
    from holdfast.cli.work import log

    return log.run(url)


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("log")
