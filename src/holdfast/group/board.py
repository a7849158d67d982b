"""The board: a TCP key-value store of our own, hosted by rank 0, for the small messages of a save.

Who is ready, who failed, is it committed?  A wait on the board has a deadline and names who is missing; it
works from background threads and does not disturb a collective under way.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from holdfast.addresses import own_address
from holdfast.errors import AgentError, Deadline
from holdfast.group.errors import translated

POLL_S = 0.002
LEAVE_S = 15.0
ANSWER_S = 10.0
"""Beyond the deadline for the ranks' answers: how long rank 0 may take to decide."""


class Board:
    """Messages by key; with one rank, kept here.  Construction is collective."""

    def __init__(self, rank: int, size: int, deadline_s: float) -> None:
        self.rank = rank
        self.size = size
        self.deadline_s = deadline_s
        self._tcp: Any = self._open() if size > 1 else None
        """None with one rank, and when this rank has left."""
        self._local: dict[str, bytes] = {}
        self._answered: dict[str, str] = {}
        self._leaving = False

    def _open(self) -> Any:
        timeout = timedelta(seconds=self.deadline_s)
        place: list[Any] = [None, 0, ""]
        board, failed = None, None
        if self.rank == 0:
            try:
                place[0] = os.environ.get("HOLDFAST_HOST") or own_address()
                board = dist.TCPStore(
                    place[0], 0, None, True, timeout=timeout, wait_for_workers=False, use_libuv=True
                )
                place[1] = board.port
            except Exception as error:
                failed, place[2] = error, f"{type(error).__name__}: {error}"
        dist.broadcast_object_list(place, src=0)
        host, port, problem = place
        if problem:
            raise AgentError(
                f"rank 0 cannot open a port for messages on {host!r}: {problem}",
                hint="set HOLDFAST_HOST on rank 0 to an address that the other ranks can reach",
            ) from failed
        if self.rank != 0:
            with translated(f"connect to rank 0 at {host}:{port}"):
                board = dist.TCPStore(
                    host, port, None, False, timeout=timeout, wait_for_workers=False, use_libuv=True
                )
        return board

    @property
    def _there(self) -> Any:
        """Deadline if this rank has left: nobody answers it any more."""
        if self._tcp is None:
            raise Deadline("this rank has left the others")
        return self._tcp

    def post(self, key: str, value: bytes) -> None:
        """Pin a message to the board."""
        if self.size == 1:
            self._local[key] = value
            return
        with translated(f"post {key}"):
            self._there.set(key, value)

    def post_first(self, key: str, value: bytes) -> None:
        """Pin a message to the board, unless there is one under this key."""
        if self.size == 1:
            self._local.setdefault(key, value)
            return
        with translated(f"post {key}"):
            self._there.compare_set(key, "", value.decode())

    def _wait(self, key: str, limit: float) -> bytes:
        """Rank 0's answer to `key`, as soon as it is there.

        A rank may ask long before rank 0 does: who finds that rank 0 has begun waits once more as long.
        """
        until, alive = time.monotonic() + limit, False
        for pause in self._pauses():
            with translated(f"wait for rank 0 ({key})"):
                if self._there.check([f"{key}/answer"]):
                    return bytes(self._there.get(f"{key}/answer"))
                late = self._leaving or time.monotonic() > until
                if late and not alive and self._there.check([f"{key}/alive"]):
                    until, alive, late = time.monotonic() + limit, True, False
            if late:
                raise Deadline(
                    self._in_vain("rank 0", limit),
                    rank=0,
                    hint="look at the log of that rank; it may have died or never made this call",
                )
            time.sleep(pause)
        raise AssertionError

    def _pauses(self) -> Iterator[float]:
        """Seconds between looks at the board: longer and longer, and the more so the more ranks look."""
        pause, most = POLL_S / 4, max(0.01, 0.01 * self.size / 8)
        while True:
            yield pause
            pause = min(pause * 1.5, most)

    def peek(self, key: str) -> bytes | None:
        """The message under `key`, or None if there is none now."""
        if self.size == 1:
            return self._local.get(key)
        with translated(f"look for {key}"):
            return bytes(self._there.get(key)) if self._there.check([key]) else None

    def gather(self, key: str, value: bytes, deadline_s: float | None = None) -> list[bytes]:
        """On rank 0 every rank's value, in rank order; elsewhere an empty list, at once.

        Deadline names every rank that did not answer in time.
        """
        if self.size == 1:
            return [value]
        if self.rank != 0:
            self.post(f"{key}/{self.rank}", value)
            return []
        answers = {0: value}
        limit = self.deadline_s if deadline_s is None else deadline_s
        until, pauses = time.monotonic() + limit, self._pauses()
        while len(answers) < self.size:
            if self._collect(key, answers):
                continue
            if self._leaving or time.monotonic() > until:
                missing = [r for r in range(self.size) if r not in answers]
                raise Deadline(
                    self._in_vain(f"rank {_ranks(missing)}", limit),
                    rank=missing[0],
                    hint="look at the log of that rank; it may have died or never made this call",
                )
            time.sleep(next(pauses))
        return [answers[r] for r in range(self.size)]

    def _collect(self, key: str, answers: dict[int, bytes]) -> bool:
        found = False
        with translated(f"gather {key}"):
            for rank in range(self.size):
                name = f"{key}/{rank}"
                if rank not in answers and self._there.check([name]):
                    answers[rank] = bytes(self._there.get(name))
                    self._there.delete_key(name)
                    found = True
        return found

    def ask(
        self,
        key: str,
        value: bytes,
        decide: Callable[[list[bytes]], bytes],
        deadline_s: float | None = None,
    ) -> bytes:
        """Every rank gives a value, rank 0 decides from all of them, everybody learns the answer.

        If rank 0 finds ranks missing, the others learn that too.
        """
        limit = self.deadline_s if deadline_s is None else deadline_s
        if self.size == 1:
            return decide([value])
        if self.rank == 0:
            return self._decide(key, value, decide, limit)
        self.post(f"{key}/{self.rank}", value)
        answer = self._wait(key, limit + ANSWER_S)
        if answer[:1] != b"\0":
            kind = Deadline if answer[:1] == b"\1" else AgentError
            raise kind(answer[1:].decode())
        return answer[1:]

    def _decide(
        self, key: str, value: bytes, decide: Callable[[list[bytes]], bytes], limit: float
    ) -> bytes:
        self.post(f"{key}/alive", b"")
        try:
            answer = decide(self.gather(key, value, limit))
        except Exception as error:
            kind = b"\1" if isinstance(error, Deadline) else b"\2"
            text = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
            self.post(f"{key}/answer", kind + f"rank 0: {text}".encode())
            raise
        self.post(f"{key}/answer", b"\0" + answer)
        self._forget(key)
        return answer

    def _in_vain(self, who: str, limit: float) -> str:
        if self._leaving:
            return f"{who} had not answered when this process came to its end"
        return f"{who} did not answer within {limit:g} s"

    def hurry(self) -> None:
        """From now on wait for nobody: every wait for a message ends with Deadline, if it is not there."""
        self._leaving = True

    def _forget(self, key: str) -> None:
        """Everybody who answered `family/n` has read the answer to `family/n-1`."""
        family, _, number = key.rpartition("/")
        old, self._answered[family] = self._answered.get(family), key
        if old is not None and number:
            with translated(f"forget {old}"):
                self._there.delete_key(f"{old}/answer")
                self._there.delete_key(f"{old}/alive")

    def close(self) -> None:
        """Leave.  Rank 0 hosts the board and stays until all have left, but no longer than a while."""
        if self._tcp is None:
            return
        try:
            if self.rank == 0:
                self.gather("bye", b"", min(self.deadline_s, LEAVE_S))
            else:
                self.post(f"bye/{self.rank}", b"")
        except AgentError:
            pass  # whoever is gone does not need the board
        self._tcp = None


def _ranks(ranks: list[int], most: int = 8) -> str:
    return ", ".join(map(str, ranks[:most])) + (
        f" and {len(ranks) - most} more" * (len(ranks) > most)
    )
