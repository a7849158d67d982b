"""What `holdfast prove` has to say of a script: the form of the rows of the tables."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.prove.proving import Plan, prove
from holdfast.prove.running import CannotProve
from ports import free_port
from prove.forked import listening


@dataclass(frozen=True)
class Case:
    """A script below this folder, the answer that is right, and in one sentence why.

    `answer` is "exact", or the id of the cause. `ranks` above 1 are started by torchrun. `options`
    are options of `prove` itself, which stand in front of the command.
    """

    script: str
    answer: str
    why: str
    ranks: int = 1
    options: tuple[str, ...] = ()


def proved(case: Case, script: Path, folder: Path, *words: str) -> tuple[str, str]:
    """What is said of a script in this working directory, as an id and as text."""
    options: dict[str, Any] = {"seed": 1}
    for option, value in zip(case.options[::2], case.options[1::2]):
        name = option.removeprefix("--").replace("-", "_")
        options[name] = int(value) if value.isdigit() else value
    with listening(folder) as command:
        words = (str(script), "--root", "root", *words)
        if options.pop("ranks", 0) == 1:  # as torchrun would start it
            shared = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()} RANK=0 WORLD_SIZE=1"
            options["then"] = shlex.join(("env", *shared.split(), *command(1), *words))
        words = (*command(case.ranks), *words)
        try:
            proof = prove(Plan(words, steps=12, **options))
        except CannotProve as error:
            return error.cause, str(error)
    return proof.cause or "exact", repr(proof)
