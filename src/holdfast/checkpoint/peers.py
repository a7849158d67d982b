"""Calls between ranks that load together, and how an error of one becomes an error of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from holdfast.errors import Corrupt, FormatError, NotFound, RankErrors, Unavailable


class Window(Protocol):
    """Memory of this rank that the ranks of its host can read."""

    mine: memoryview
    theirs: dict[int, memoryview]
    """Windows of other ranks on this host; a rank that is not here must be sent its bytes."""

    def close(self) -> None: ...


class Peers(Protocol):
    """The ranks that load together; every method is collective and has a deadline."""

    rank: int
    size: int

    def exchange(self, payloads: Sequence[bytes]) -> list[memoryview]:
        """Send `payloads[r]` to each rank r; returns what each sent to this one."""

    def exchange_parts(self, parts: Sequence[Sequence[bytes | memoryview]]) -> list[memoryview]:
        """The same, for payloads in parts."""

    def share(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes."""

    def any(self, flag: bool) -> bool:
        """True if any rank says so; returns when all have said."""

    def most(self, number: int) -> int:
        """The largest number that any rank says."""

    def window(self, size: int) -> Window:
        """Memory that is shared within the host."""


_SAME = (Unavailable, NotFound, FormatError)
"""Errors by which a caller decides whether an older step may be tried."""


class _Report(msgspec.Struct, frozen=True):
    """The message of each rank when a round is read: its error, if it has one."""

    message: str | None = None
    key: str | None = None
    start: int | None = None
    stop: int | None = None
    expected: str | None = None
    found: str | None = None
    kind: str = ""
    """Class of the error, if the other ranks shall raise the same."""


def report_of(error: BaseException | None) -> bytes:
    """An error as bytes for the other ranks; empty for none."""
    if error is None:
        return b""
    if isinstance(error, Corrupt):
        report = _Report(
            error.message,
            error.key,
            error.start,
            error.stop,
            error.expected,
            error.found,
            "Corrupt",
        )
    elif type(error) in _SAME:
        report = _Report(error.message, error.key, kind=type(error).__name__)  # type: ignore[attr-defined]
    else:
        report = _Report(f"{type(error).__name__}: {error}")
    return msgspec.msgpack.encode(report)


def agree(peers: Peers, error: BaseException | None, step: int | None) -> None:
    """Raise on every rank if any rank has an error: the same one where its kind matters, else
    RankErrors."""
    if not peers.any(error is not None):
        return
    answers = peers.share(report_of(error))
    reports = {r: msgspec.msgpack.decode(a, type=_Report) for r, a in enumerate(answers) if a}
    if not reports:
        return
    for rank, one in reports.items():
        if one.kind == "Corrupt":
            raise Corrupt(
                one.message or "",
                key=one.key,
                start=one.start,
                stop=one.stop,
                expected=one.expected,
                found=one.found,
                rank=rank,
                step=step,
            ) from error
    for kind in _SAME:
        for rank, one in reports.items():
            if one.kind == kind.__name__:
                raise kind(one.message or "", key=one.key, rank=rank, step=step) from error
    raise RankErrors("load", {r: x.message or "" for r, x in reports.items()}, step=step) from error
