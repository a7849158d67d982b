"""Several ranks as a group: they meet at each collective call, and talk by the board and the exchange."""

from __future__ import annotations

from holdfast.core.group.board import Board
from holdfast.core.group.exchange import Exchange
from holdfast.core.group.meeting import Meeting
from holdfast.core.group.shared_memory import HostWindow


class SeveralRanks(Board, Exchange):
    """The ranks of a meeting, two or more."""

    def __init__(
        self,
        meeting: Meeting,
        deadline_s: float,
        call: str,
        *,
        meet_s: float | None,
        tell_after_s: float | None,
    ) -> None:
        """As `meet`.  Collective; blocks."""
        self.meeting = meeting
        self.deadline_s = deadline_s
        self._meet_s = meet_s
        self._tell_after_s = tell_after_s
        self.together(call)
        Board.__init__(self, meeting.rank, meeting.size, deadline_s, confide=self.confide)
        self.asked = 0
        """Counter for the keys of collective questions that have no number of their own."""

    def together(self, call: str) -> None:
        """Begin a collective call: block until all ranks have made it.

        Deadline names the missing ranks; UsageError if ranks have made another call.
        """
        limit = self.deadline_s if self._meet_s is None else self._meet_s
        self.met = self.meeting.meet(call, limit, holds=self.holds, tell_after_s=self._tell_after_s)
        if self.met.is_anew:
            self.meeting.held.clear()

    def window(self, size: int) -> HostWindow:
        """Return `size` bytes of memory of this rank that the ranks of its host can map.  Collective."""
        return HostWindow(self, size)
