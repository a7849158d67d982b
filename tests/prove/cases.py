"""What `holdfast prove` has to say of a script: the form of the rows of the tables."""

from dataclasses import dataclass


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
