"""Raising the error of one rank on all ranks that load together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.base.errors import Corrupt, FormatError, NotFound, Unavailable
from holdfast.base.wire import WireError, encode_error, rank_errors, wire_error

if TYPE_CHECKING:
    from holdfast.core.group import Group


_SAME = (Corrupt, Unavailable, NotFound, FormatError)
"""Errors after which a caller may try an older step; they are raised as they are."""


def of_the_step(failed: dict[int, WireError]) -> tuple[int, WireError] | None:
    """Return the first rank with an error of the step's data, and that error; None if there is none."""
    for kind in _SAME:
        for rank, one in failed.items():
            if one.kind == kind.__name__:
                return rank, one
    return None


def raise_together(peers: Group, error: BaseException | None, step: int | None) -> None:
    """Raise on every rank if any rank has an error: an error of the step's data as it is, else RankErrors.
    Collective."""
    if not peers.any(error is not None):
        return
    answers = peers.all_gather(b"" if error is None else encode_error(error))
    failed = {rank: wire_error(answer) for rank, answer in enumerate(answers) if answer}
    if (damage := of_the_step(failed)) is not None:
        raise damage[1].error(rank=damage[0], step=step) from error
    if failed:
        raise rank_errors("load", failed, step) from error


@contextmanager
def raise_on_all(peers: Group, step: int) -> Iterator[None]:
    """Raise an error of one rank in this block on all ranks.  Collective."""
    error: Exception | None = None
    try:
        yield
    except Exception as failed:
        error = failed
    if peers.size > 1:
        raise_together(peers, error, step)
    elif error is not None:
        raise error
