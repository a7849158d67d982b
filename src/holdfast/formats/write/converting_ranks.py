"""The processes that convert together: their shares of files, and agreement on the result."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from holdfast.base.errors import AgentError, UsageError
from holdfast.base.wire import WireError, decode_msgpack
from holdfast.core.checkpoint.outfiles import Outfile

_DEADLINE_S = 3600.0
"""Seconds that a finished rank waits for the slowest, as long as that shows signs of life."""
SILENT_S = 60.0
"""Seconds without a sign of life after which a rank counts as dead."""
MEET_S = 60.0
"""Seconds that a rank waits for the others to begin, as torchrun starts all about the same time."""
_TELL_S = 2.0
"""Seconds after which a waiting rank warns which ranks are missing."""


class Ranks:
    """The ranks that convert together; without a group, this process alone."""

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def share(self, files: Sequence[Outfile]) -> list[Outfile]:
        """This rank's files; all ranks have about equally many bytes."""
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
        """Run `work` on rank 0; return its result, or raise its error, on all ranks."""
        if self._group is None:
            return bool(work())

        def decide(_: list[bytes]) -> bytes:
            return b"true" if work() else b""

        return bool(self._group.ask(f"convert/{name}", b"", decide, _DEADLINE_S))

    def check_same(self, step: int, identity: str) -> None:
        """UsageError on all ranks unless all have opened the same step of the same source, which may have
        got a newer step meanwhile."""

        def decide(answers: list[bytes]) -> bytes:
            found = [decode_msgpack(a, tuple[int, str]) for a in answers]
            other = next((r for r, one in enumerate(found) if one != found[0]), None)
            if other is not None:
                (here, _), (there, _) = found[0], found[other]
                what = (
                    f"step {there}, and rank 0 step {here}"
                    if here != there
                    else "other files than rank 0"
                )
                raise UsageError(
                    f"rank {other} has opened {what}",
                    hint="name the step, as URL@STEP, and convert what nobody writes to",
                )
            return b""

        if self._group is not None:
            mine = msgspec.msgpack.encode((step, identity))
            self._group.ask("convert/source", mine, decide, _DEADLINE_S)

    @contextmanager
    def all(self, name: str) -> Iterator[None]:
        """In this block all ranks work; raise on all ranks if any rank fails."""
        failure = None
        try:
            yield
        except BaseException as error:  # an interrupted rank has not written everything
            failure = WireError.of(error)
            raise
        finally:
            if self._group is not None:
                self._together(name, failure)

    def _together(self, name: str, failure: WireError | None) -> None:
        """Raise the error of the first rank that failed, if this one has not."""

        def decide(answers: list[bytes]) -> bytes:
            failures = [decode_msgpack(a, WireError | None) for a in answers]
            failed = [(rank, one) for rank, one in enumerate(failures) if one is not None]
            return msgspec.msgpack.encode(failed[:1])

        mine = msgspec.msgpack.encode(failure)
        answer = self._group.ask(f"convert/{name}", mine, decide, _DEADLINE_S)
        for rank, one in decode_msgpack(answer, list[tuple[int, WireError]]):
            if failure is None:
                raise one.error(rank=rank)


@contextmanager
def converting_ranks() -> Iterator[Ranks]:
    """The ranks of this process's torchrun, if there is one.

    A child process of a rank inherits RANK and WORLD_SIZE although no other rank may convert: it warns
    which ranks are missing, and raises Deadline after `MEET_S`.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "MASTER_ADDR" not in os.environ:
        yield Ranks()
        return
    from holdfast.core.group import launched
    from holdfast.core.group.pulse import pulse

    try:
        group = launched(SILENT_S, "convert()", MEET_S, _TELL_S)
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
