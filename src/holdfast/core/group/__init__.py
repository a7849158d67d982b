"""The ranks of a job, and all messages between them for saves, restores and conversions.

Other code asks torch.distributed only for ranks, groups and meshes, but for the DDP hook of
`live.gradient_compression`, which exchanges gradients for the training; `integrations.deepspeed`, which
broadcasts what rank 0 has read; and `launch`, whose nodes meet before there are ranks.

Every collective call begins with a *meeting*, which waits until all ranks have made the call.  Then ranks
communicate by the *board* (small messages of a save) and the *exchange* (collectives of a load), both apart
from the training's own collectives.  Without torch.distributed there is one rank, and nothing is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from holdfast.core.group.board import Board
from holdfast.core.group.exchange import Exchange
from holdfast.core.group.meeting import Meeting, Met, meeting_of_job, meeting_over, store_of_launch

if TYPE_CHECKING:
    from holdfast.core.group.shared_memory import HostWindow


class Group(Board, Exchange):
    """All ranks of the default process group; one rank without torch.distributed."""

    def __init__(
        self,
        deadline_s: float = 600.0,
        call: str = "this call of holdfast",
        *,
        meeting: Meeting | None = None,
        meet_s: float | None = None,
        tell_after_s: float | None = None,
    ) -> None:
        """Meet all ranks that make `call`, within `meet_s` (None: `deadline_s`).  Collective; blocks.

        `deadline_s` bounds every later wait.  `meeting`: of other processes than the default process group.
        `tell_after_s`: seconds after which to warn which ranks are missing.
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
        """Counter for the keys of collective questions that have no number of their own."""

    def together(self, call: str) -> None:
        """Begin a collective call: block until all ranks have made it.

        Deadline names the missing ranks; UsageError if ranks have made another call.
        """
        if self.meeting is None:
            return
        limit = self.deadline_s if self._meet_s is None else self._meet_s
        self.met = self.meeting.meet(call, limit, holds=self.holds, tell_after_s=self._tell_after_s)
        if self.met.is_anew:
            self.meeting.held.clear()

    def window(self, size: int) -> HostWindow:
        """Return `size` bytes of memory of this rank that the ranks of its host can map.  Collective."""
        from holdfast.core.group.shared_memory import HostWindow

        return HostWindow(self, size)


def launched(deadline_s: float, call: str, meet_s: float, tell_after_s: float) -> Group:
    """The processes of this torchrun as a group, for a tool without a process group.

    They meet within `meet_s`; after `tell_after_s` this process warns which ranks are missing.
    """
    if dist.is_available() and dist.is_initialized():
        return Group(deadline_s, call, meet_s=meet_s, tell_after_s=tell_after_s)
    meeting = meeting_over(*store_of_launch(meet_s))
    return Group(deadline_s, call, meeting=meeting, meet_s=meet_s, tell_after_s=tell_after_s)


__all__ = ["Group", "launched"]
