"""The ranks of a job, and all messages between them for saves, restores and conversions.

Other code asks torch.distributed only for ranks, groups and meshes, but for the DDP hook of
`live.gradient_compression`, which exchanges gradients for the training; `integrations.deepspeed`, which
broadcasts what rank 0 has read; and `launch`, whose nodes meet before there are ranks.

Every collective call begins with a *meeting*, which waits until all ranks have made the call.  Then ranks
communicate by the *board* (small messages of a save) and the *exchange* (collectives of a load), both apart
from the training's own collectives (`ranks`).  Without torch.distributed there is one rank, `Alone`, which
sends nothing, and needs nothing of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch.distributed as dist

if TYPE_CHECKING:
    from holdfast.core.group.meeting import Meeting
    from holdfast.core.group.ranks import SeveralRanks
    from holdfast.core.group.shared_memory import HostWindow

Group: TypeAlias = "Alone | SeveralRanks"
"""All ranks of a job.  `Board` and `Exchange` describe the methods, which are the same for one rank."""


class Alone:
    """One rank: it agrees with itself, and its messages stay in this object."""

    rank, size = 0, 1
    lost = awaited = ""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.asked = 0
        self._messages: dict[str, bytes] = {}

    def together(self, call: str) -> None:
        return

    def check(self) -> None:
        return

    def post(self, key: str, value: bytes, limit_s: float | None = None) -> None:
        self._messages[key] = value

    def post_first(self, key: str, value: bytes) -> None:
        self._messages.setdefault(key, value)

    def peek(self, key: str) -> bytes | None:
        return self._messages.get(key)

    def hide(self, text: str) -> str:
        return text

    def reveal(self, hidden: str) -> str:
        return hidden

    def gather(
        self, key: str, value: bytes, deadline_s: float | None = None, awaited: str = ""
    ) -> list[bytes]:
        return [value]

    def ask(
        self,
        key: str,
        value: bytes,
        decide: Callable[[list[bytes]], bytes],
        deadline_s: float | None = None,
        awaited: str = "",
    ) -> bytes:
        return decide([value])

    def exchange(self, payloads: Sequence[bytes]) -> list[memoryview]:
        return [memoryview(bytearray(one)) for one in payloads]

    def exchange_parts(self, parts: Sequence[Sequence[bytes | memoryview]]) -> list[memoryview]:
        return [memoryview(bytearray().join(to)) for to in parts]

    def all_gather(self, data: bytes) -> list[bytes]:
        return [data]

    def any(self, flag: bool) -> bool:
        return flag

    def all_max(self, number: int) -> int:
        return number

    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        return data or b""

    def from_rank0(self, work: Callable[[], bytes]) -> bytes:
        return work()

    def window(self, size: int) -> HostWindow:
        from holdfast.core.group.shared_memory import HostWindow

        return HostWindow(self, size)

    def abort_waits(self) -> None:
        return

    def close(self, limit_s: float | None = None) -> None:
        return


def meet(
    deadline_s: float = 600.0,
    call: str = "this call of holdfast",
    *,
    meeting: Meeting | None = None,
    meet_s: float | None = None,
    tell_after_s: float | None = None,
) -> Group:
    """Meet all ranks of the default process group that make `call`, within `meet_s` (None: `deadline_s`).
    Collective; blocks.

    `deadline_s` bounds every later wait.  `meeting`: of other processes than the default process group.
    `tell_after_s`: seconds after which to warn which ranks are missing.
    """
    if meeting is None:
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return Alone(deadline_s)
        from holdfast.core.group.meeting import meeting_of_job

        meeting = meeting_of_job()
    if meeting.size == 1:
        return Alone(deadline_s)
    from holdfast.core.group.ranks import SeveralRanks

    return SeveralRanks(meeting, deadline_s, call, meet_s=meet_s, tell_after_s=tell_after_s)


def launched(deadline_s: float, call: str, meet_s: float, tell_after_s: float) -> Group:
    """The processes of this torchrun as a group, for a tool without a process group.

    They meet within `meet_s`; after `tell_after_s` this process warns which ranks are missing.
    """
    meeting = None
    if not (dist.is_available() and dist.is_initialized()):
        from holdfast.core.group.meeting import meeting_over, store_of_launch

        meeting = meeting_over(*store_of_launch(meet_s))
    return meet(deadline_s, call, meeting=meeting, meet_s=meet_s, tell_after_s=tell_after_s)


__all__ = ["Alone", "Group", "launched", "meet"]
