"""The processes that convert together: who writes which files, and that all know how it ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from holdfast.checkpoint.outfiles import Outfile
from holdfast.errors import AgentError, HoldfastError

DEADLINE_S = 3600.0
"""Seconds that a rank that has finished waits for the slowest, if that one shows signs of life."""
SILENT_S = 60.0
"""Seconds for which a rank may show no sign of life."""
MEET_S = 60.0
"""Seconds a rank waits for the others to begin: all of a torchrun start at about the same time."""
TELL_S = 2.0
"""Seconds after which a waiting rank says for whom it waits."""


class Ranks:
    """This process among those that convert together; one that is alone does everything."""

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def share(self, files: Sequence[Outfile]) -> list[Outfile]:
        """Files for this rank, so that all have about as many bytes."""
        if self._group is None:
            return list(files)
        loads = [0] * self._group.size
        mine = []
        for file in sorted(files, key=lambda f: (-f.bytes, f.path)):
            rank = loads.index(min(loads))
            loads[rank] += file.bytes + 1
            if rank == self._group.rank:
                mine.append(file)
        return mine

    def first(self, name: str, work: Callable[[], bool | None]) -> bool:
        """Rank 0 does something, the others wait and learn how it ended: what it returns, or an error."""
        if self._group is None:
            return bool(work())

        def decide(_: list[bytes]) -> bytes:
            return b"true" if work() else b""

        return bool(self._group.ask(f"convert/{name}", b"", decide, DEADLINE_S))

    @contextmanager
    def all(self, name: str) -> Iterator[None]:
        """Everybody does something; it counts if it succeeded everywhere."""
        problem = ""
        try:
            yield
        except BaseException as error:  # who is interrupted has not written everything
            problem = f"{type(error).__name__}: {error}"
            raise
        finally:
            if self._group is not None:
                self._together(name, problem)

    def _together(self, name: str, problem: str) -> None:
        def decide(problems: list[bytes]) -> bytes:
            return msgspec.json.encode([p.decode() for p in problems])

        told = self._group.ask(f"convert/{name}", problem.encode(), decide, DEADLINE_S)
        failed = [(r, p) for r, p in enumerate(msgspec.json.decode(told)) if p]
        if failed and not problem:
            raise HoldfastError(f"rank {failed[0][0]} failed: {failed[0][1]}", rank=failed[0][0])


@contextmanager
def converting_ranks() -> Iterator[Ranks]:
    """The ranks of the torchrun that this process is part of, if it is.

    A process that a rank has started inherits RANK and WORLD_SIZE, and nobody else may come: it says for
    whom it waits, and ends with Deadline after `MEET_S`.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "MASTER_ADDR" not in os.environ:
        yield Ranks()
        return
    from holdfast.group import launched, pulse

    try:
        group = launched(SILENT_S, "convert()", MEET_S, TELL_S)
    except AgentError as error:
        error.hint = (
            "a conversion under torchrun is made by all ranks; for this process to make it alone, start it "
            "without WORLD_SIZE: `env -u WORLD_SIZE holdfast convert ...`"
        )
        raise
    try:
        with pulse(group, "convert()", SILENT_S):
            yield Ranks(group)
    finally:
        group.close()
