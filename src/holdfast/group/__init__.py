"""The ranks of a job: the one package that calls torch.distributed.

Two ways to talk, both apart from the training's own collectives: the *board* for the small messages of a
save, and the *exchange* for the collectives of a load.  Without torch.distributed there is one rank, and
nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from holdfast.group.board import Board
from holdfast.group.exchange import Exchange
from holdfast.group.window import HostWindow


class Group(Board, Exchange):
    """All ranks of the default process group, or the one process there is.

    Construction is collective.  `deadline_s` bounds every wait.
    """

    def __init__(self, deadline_s: float = 600.0) -> None:
        on = dist.is_available() and dist.is_initialized()
        Board.__init__(
            self,
            rank=dist.get_rank() if on else 0,
            size=dist.get_world_size() if on else 1,
            deadline_s=deadline_s,
        )
        self.asked = 0
        """Number of collective questions so far that have no number of their own."""

    def window(self, size: int) -> HostWindow:
        """Memory of this rank that the ranks on its host can see.  Collective."""
        return HostWindow(self, size)


@contextmanager
def joined() -> Iterator[None]:
    """Join the other processes of this torchrun, for a tool that is no training script."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", timeout=timedelta(hours=1))
    try:
        yield
    finally:
        dist.destroy_process_group()


__all__ = ["Group", "HostWindow", "joined"]
