"""Signs of life: ranks that wait long for each other notice a dead rank early.

A rank may spend an hour converting and still be healthy.  So each rank increments a counter on the board
from a thread, and rank 0, which waits for all ranks, checks that the counters move:

    rank 1    pulse/1 = 7, 8, 9 ─ ─ ─ ─ ─ ─ ─ (killed)
    rank 0    looks:  7, 8, 9, 9, 9, 9 ... for `silent_s`: whatever it waits for, rank 1 is silent

Ranks notice a dead rank 0 because the board, which it hosts, stops answering.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from holdfast.base.errors import AgentError, Deadline
from holdfast.core.group import Alone, Group
from holdfast.core.group.board import LOOK, Board

_LOOKS = 10
"""Number of times that a rank counts within `silent_s`."""


@contextmanager
def pulse(board: Group, call: str, silent_s: float) -> Iterator[None]:
    """In this block, a rank that is silent for `silent_s` ends the waits of rank 0, and so of all ranks."""
    if isinstance(board, Alone):
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
        board.silent = None  # rank 0 hosts the board, where the others read its error


def _count(board: Board, silent_s: float, ended: threading.Event) -> None:
    with suppress(AgentError):  # rank 0 is gone; the rank's own wait for it reports that
        while not ended.is_set():
            board.count([f"pulse/{board.rank}"], 1)
            ended.wait(silent_s / _LOOKS)


def _watch(board: Board, call: str, silent_s: float, ended: threading.Event) -> None:
    ranks = range(1, board.size)
    seen = dict.fromkeys(ranks, (-1, 0.0))
    """Each rank's count, and when it was first seen."""
    with suppress(AgentError):
        while board.silent is None and not ended.wait(silent_s / _LOOKS):
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
