"""Runs a proof, and shows it."""

from __future__ import annotations

import signal
import sys
from typing import Any

from holdfast.cli.screen import Result, say, say_lines
from holdfast.prove.proving import Plan, prove
from holdfast.prove.report import as_json, lines
from holdfast.prove.running import CannotProve


def run(**options: Any) -> Result:
    """See `holdfast.cli.prove`."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # runs end, too
    try:
        proof = prove(Plan(**options), lambda line: say(line, file=sys.stderr))
    except CannotProve as error:
        told = {"exact": None, "cause": error.cause, "message": str(error)}
        text = str(error)
        return Result(lambda: told, lambda: say_lines(text), 2)
    return Result(
        lambda: as_json(proof), lambda: say_lines("\n".join(lines(proof))), int(not proof)
    )
