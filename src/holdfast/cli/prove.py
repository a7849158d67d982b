"""`holdfast prove -- COMMAND`: does a training that is killed go on exactly, and if not, what does not?"""

from __future__ import annotations

import signal
import sys
from typing import Any

from holdfast.cli.screen import Result, say, say_lines
from holdfast.prove.proving import Plan, prove
from holdfast.prove.report import as_json, lines
from holdfast.prove.running import CannotProve


def run(**options: Any) -> Result:
    """See `holdfast.cli.verbs`."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        proof = prove(Plan(**options), lambda line: say(line, file=sys.stderr))
    except CannotProve as error:
        told = {"exact": None, "cause": error.cause, "message": str(error)}
        text = str(error)
        return Result(lambda: told, lambda: say_lines(text), 2)
    finally:
        signal.signal(signal.SIGTERM, before)  # until then it ends the runs, too
    return Result(
        lambda: as_json(proof), lambda: say_lines("\n".join(lines(proof))), int(not proof)
    )


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("prove")
