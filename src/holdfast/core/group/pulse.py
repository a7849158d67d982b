"""Signs of life: for ranks that wait for each other longer than anybody wants to wait for a dead one.

Who converts a large checkpoint may be an hour late and well.  So each rank counts on the board, from a
thread of its own, and rank 0, which waits for all, looks whether the counts still move:

    rank 1    pulse/1 = 7, 8, 9 ─ ─ ─ ─ ─ ─ ─ (killed)
    rank 0    looks:  7, 8, 9, 9, 9, 9 ... for `silent_s`: whatever it waits for, rank 1 is silent

That rank 0 itself is silent, the others see by the board, which does not answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from holdfast.base.errors import AgentError, Deadline
from holdfast.core.group.board import LOOK, Board

LOOKS = 10
"""Number of times a rank counts within the time for which it may be silent."""


@contextmanager
def pulse(board: Board, call: str, silent_s: float) -> Iterator[None]:
    """In this block a rank that is silent for `silent_s` ends rank 0's waits for it, and so everybody's."""
    if board.size == 1:
        yield
        return
    ended = threading.Event()
    watch = partial(_watch, board, call, silent_s, ended)
    count = partial(_count, board, silent_s, ended)
    work = watch if board.rank == 0 else count
    threading.Thread(target=work, name="holdfast-pulse", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        board.silent = None  # the others are still to hear of it, and rank 0 hosts the board


def _count(board: Board, silent_s: float, ended: threading.Event) -> None:
    with suppress(AgentError):  # rank 0 is gone, which whoever waits for it finds as well
        while not ended.is_set():
            board.count([f"pulse/{board.rank}"], 1)
            ended.wait(silent_s / LOOKS)


def _watch(board: Board, call: str, silent_s: float, ended: threading.Event) -> None:
    ranks = range(1, board.size)
    seen = dict.fromkeys(ranks, (-1, 0.0))
    """Each rank's count, and when it was first seen."""
    with suppress(AgentError):
        while board.silent is None and not ended.wait(silent_s / LOOKS):
            now = time.monotonic()
            for rank, count in zip(ranks, board.count([f"pulse/{rank}" for rank in ranks])):
                last, since = seen[rank]
                if count != last:
                    seen[rank] = count, now
                elif now - since > silent_s:
                    board.silent = Deadline(
                        f"rank {rank} has shown no sign of life for {silent_s:g} s in {call}",
                        rank=rank,
                        hint=LOOK,
                    )
                    break
