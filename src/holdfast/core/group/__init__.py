"""The ranks of a job: the one package that calls torch.distributed.

Every collective call begins with a *meeting*: no rank begins before all have come.  Then there are two ways
to talk, both apart from the training's own collectives: the *board* for the small messages of a save, and
the *exchange* for the collectives of a load.  Without torch.distributed there is one rank, and nothing is
sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from holdfast.core.group.board import Board
from holdfast.core.group.exchange import Exchange
from holdfast.core.group.meeting import Meeting, Met, meeting_of_job, meeting_over, store_of_launch

if TYPE_CHECKING:
    from holdfast.core.group.window import HostWindow


class Group(Board, Exchange):
    """All ranks of the default process group, or the one process there is."""

    def __init__(
        self,
        deadline_s: float = 600.0,
        call: str = "this call of holdfast",
        *,
        meeting: Meeting | None = None,
        meet_s: float | None = None,
        tell_after_s: float | None = None,
    ) -> None:
        """Collective; begins with a meeting of those who make `call`, for at most `meet_s` (`deadline_s`).

        `deadline_s` bounds every wait.  `meeting`: of other processes than the default process group's.
        `tell_after_s`: when to warn of whom it is waiting for.
        """
        self.meeting = meeting if meeting is not None else meeting_of_job()
        self.deadline_s = deadline_s
        self.met: Met | None = None
        self._meet_s = meet_s
        self._tell_after_s = tell_after_s
        self.rank = self.meeting.rank if self.meeting is not None else 0
        self.size = self.meeting.size if self.meeting is not None else 1
        self.together(call)
        Board.__init__(self, self.rank, self.size, deadline_s, confide=self.confide)
        self.asked = 0
        """Number of collective questions so far that have no number of their own."""

    def together(self, call: str) -> None:
        """Begin a collective call: returns when all ranks have come to it.

        Deadline names those that have not; UsageError if they have come to another one.
        """
        if self.meeting is None:
            return
        limit = self.deadline_s if self._meet_s is None else self._meet_s
        self.met = self.meeting.meet(call, limit, holds=self.holds, tell_after_s=self._tell_after_s)
        if self.met.is_anew:
            self.meeting.held.clear()

    def window(self, size: int) -> HostWindow:
        """Memory of this rank that the ranks on its host can see.  Collective."""
        from holdfast.core.group.window import HostWindow

        return HostWindow(self, size)


def launched(deadline_s: float, call: str, meet_s: float, tell_after_s: float) -> Group:
    """The processes of this torchrun, for a tool that is no training script.

    They meet within `meet_s`, and from `tell_after_s` on this one warns of whom it waits for.
    """
    if dist.is_available() and dist.is_initialized():
        return Group(deadline_s, call, meet_s=meet_s, tell_after_s=tell_after_s)
    meeting = meeting_over(*store_of_launch(meet_s))
    return Group(deadline_s, call, meeting=meeting, meet_s=meet_s, tell_after_s=tell_after_s)


__all__ = ["Group", "launched"]
