"""The board: a TCP key-value store of our own, hosted by rank 0, for the small messages of a save.

Which ranks are ready, which failed, is the step committed?  A wait on the board has a deadline and names
the missing ranks.  It works from background threads and does not disturb a collective.  The deadline
holds even if rank 0 is stopped, as requests go through a `StoreLine`.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist

from holdfast.base.errors import AgentError, Deadline, warn_user
from holdfast.base.wire import decode_error, decode_msgpack, encode_error
from holdfast.core.group.listening import TAKES_LISTENER
from holdfast.core.group.meeting import growing, ranks_text
from holdfast.core.group.message_auth import KEY_BYTES, Seal
from holdfast.core.group.store_requests import StoreLine

_T = TypeVar("_T")
_Confide = Callable[[bytes | None], bytes]

_POLL_S = 0.002
_LEAVE_S = 15.0
_ANSWER_S = 10.0
"""Seconds beyond the deadline for the ranks' answers in which rank 0 must decide."""
_LATE_S = 1.0
"""Seconds beyond the end of a wait in which the board's host must answer."""
_MOST_TEXT = 400
"""Most characters of the error that rank 0 sends instead of the board's address."""
LOOK = "look at the log of that rank; it may have died or never made this call"


class Board:
    """Messages by key.  The constructor is collective."""

    def __init__(
        self,
        rank: int,
        size: int,
        deadline_s: float,
        seal: Seal | None = None,
        confide: _Confide | None = None,
    ) -> None:
        """`confide` passes a word of rank 0 to all ranks; `seal`: the key of an existing board."""
        self.rank = rank
        self.size = size
        self.deadline_s = deadline_s
        self._line: StoreLine | None = None
        """The line to the board; None after `close`."""
        self._lost = ""
        self._seal = seal or Seal(b"")  # until the board has one
        self._has_told = False
        """True once the user was warned of a stranger's message."""
        if confide is not None:
            self._line = self._open(confide)
        self._answered: dict[str, str] = {}
        self._leaving = False
        self._waits: dict[int, Callable[[], str]] = {}
        """By thread: a function that states in words what the thread waits for."""
        self.silent: Deadline | None = None
        """On rank 0: the error for a rank that was silent for too long."""

    @property
    def lost(self) -> str:
        """Reason why ranks can agree on nothing any more: the launcher reported a lost rank; else empty."""
        return self._lost if self._line is None else self._line.lost

    def check(self) -> None:
        """AgentError if a rank is lost."""
        if self.lost:
            raise AgentError(self.lost)

    def _open(self, confide: _Confide) -> StoreLine:
        """Open the line to the board; rank 0 sends its address and key."""
        until = time.monotonic() + self.deadline_s
        timeout = timedelta(seconds=self.deadline_s)
        if self.rank == 0:
            return self._host(confide, timeout)
        host, port, key, problem = decode_msgpack(confide(None), tuple[str, int, bytes, str])
        if problem:
            raise _closed(host, problem)
        self._seal = Seal(key)

        def connect() -> Any:
            return dist.TCPStore(
                host, port, None, False, timeout=timeout, wait_for_workers=False, use_libuv=True
            )

        line = StoreLine(connect, "rank 0", 0)
        line.ask(
            f"connect to {host}:{port}",
            lambda _: None,
            max(until - time.monotonic(), 0.0) + _LATE_S,
        )
        return line

    def _host(self, confide: _Confide, timeout: timedelta) -> StoreLine:
        host, port, problem, failed = "", 0, "", None
        key = secrets.token_bytes(KEY_BYTES)
        try:
            host, port, listener = _place(self.size)
            board = dist.TCPStore(
                host, port, None, True, timeout=timeout, wait_for_workers=False, use_libuv=True,
                master_listen_fd=listener,
            )  # fmt: skip
            port = board.port
        except Exception as error:
            failed, problem = error, f"{type(error).__name__}: {error}"[:_MOST_TEXT]
        confide(msgspec.msgpack.encode((host[:_MOST_TEXT], port, key, problem)))
        if problem:
            raise _closed(host, problem) from failed
        self._seal = Seal(key)
        return StoreLine(lambda: board, "rank 0", 0)

    def _ask(self, what: str, question: Callable[[Any], _T], limit_s: float | None = None) -> _T:
        """Return the board's answer to a question, within `limit_s`.  Deadline also after `close`."""
        if self._line is None:
            raise Deadline("this rank has left the others")
        limit = self.deadline_s if limit_s is None else limit_s
        return self._line.ask(what, question, max(limit, 0.0) + _LATE_S)

    def post(self, key: str, value: bytes, limit_s: float | None = None) -> None:
        """Write a message to the board, within `limit_s`."""
        closed = self._seal.close(key, value)
        self._ask(f"post {key}", lambda board: board.set(key, closed), limit_s)

    def post_first(self, key: str, value: bytes) -> None:
        """Write a message to the board, unless the key is taken."""
        closed = self._seal.close(key, value)
        self._ask(f"post {key}", lambda board: board.compare_set(key, b"", closed))

    def hide(self, text: str) -> str:
        """Encrypt a text for a message that strangers may read."""
        return self._seal.hide(text)

    def reveal(self, hidden: str) -> str:
        """Decrypt a text that another rank has hidden."""
        return self._seal.reveal(hidden)

    def _read(self, board: Any, key: str) -> bytes | None:
        """The message under `key`; None if there is none by a rank of this run."""
        if not board.check([key]):
            return None
        message = self._seal.open(key, bytes(board.get(key)))
        if message is None and not self._has_told:
            self._has_told = True
            warn_user(
                f"{key} on rank 0's board was not written by a rank of this run, and does not count: a "
                "stranger reaches rank 0's ports",
                hint="have a firewall keep the nodes' ports from others",
            )
        return message

    def _wait(self, key: str, limit: float, awaited: str) -> bytes:
        """Wait for rank 0's answer to `key`.

        A rank may ask long before rank 0 does: if rank 0 has begun by the end of `limit`, it waits once
        more.
        """
        until, alive = time.monotonic() + limit, False

        for pause in self._pauses():
            what, left = f"wait for {key}", until - time.monotonic()
            limit_s = min(left, self.deadline_s)
            answer = self._ask(what, lambda board: self._read(board, f"{key}/answer"), limit_s)
            if answer is not None:
                return answer
            late = self._leaving or left < 0
            if late and not alive and self._ask(what, lambda b: b.check([f"{key}/alive"]), left):
                until, alive, late = time.monotonic() + limit, True, False
            if late:
                raise Deadline(self._in_vain([0], limit, awaited), rank=0, hint=LOOK)
            time.sleep(pause)
        raise AssertionError

    @property
    def awaited(self) -> str:
        """Name the ranks that this rank waits for now; empty if it waits for none."""
        return "; ".join(dict.fromkeys(wait() for wait in tuple(self._waits.values())))

    @contextmanager
    def _waiting(self, in_words: Callable[[], str]) -> Iterator[None]:
        me = threading.get_ident()
        self._waits[me] = in_words
        try:
            yield
        finally:
            del self._waits[me]

    def _pauses(self) -> Iterator[float]:
        """Seconds between polls of the board: growing, and longer for more ranks."""
        return growing(_POLL_S / 4, max(0.01, 0.01 * self.size / 8))

    def peek(self, key: str) -> bytes | None:
        """The message under `key` now; None if there is none."""
        return self._ask(f"look for {key}", lambda board: self._read(board, key))

    def count(self, keys: list[str], number: int = 0) -> list[int]:
        """Add `number` to counters on the board; return their new values."""
        return self._ask("count", lambda board: [int(board.add(key, number)) for key in keys])

    def gather(
        self, key: str, value: bytes, deadline_s: float | None = None, awaited: str = ""
    ) -> list[bytes]:
        """Return every rank's value, in rank order, on rank 0; other ranks return an empty list at once.

        Deadline names the ranks that did not answer in time, and what was `awaited`: `begun the
        save of step 1`.
        """
        if self.rank != 0:
            self.post(f"{key}/{self.rank}", value, deadline_s)
            return []
        answers = {0: value}
        with self._waiting(lambda: self._still_missing(answers, awaited)):
            self._gather(key, answers, deadline_s, awaited)
        return [answers[r] for r in range(self.size)]

    def _gather(
        self, key: str, answers: dict[int, bytes], deadline_s: float | None, awaited: str
    ) -> None:
        limit = self.deadline_s if deadline_s is None else deadline_s
        until, pauses = time.monotonic() + limit, self._pauses()
        while len(answers) < self.size:
            if self._ask(f"gather {key}", lambda board: self._collect(board, key, answers)):
                continue
            if self.silent is not None and self.silent.rank not in answers:
                raise self.silent
            if self._leaving or time.monotonic() > until:
                missing = [r for r in range(self.size) if r not in answers]
                raise Deadline(self._in_vain(missing, limit, awaited), rank=missing[0], hint=LOOK)
            time.sleep(next(pauses))

    def _still_missing(self, answers: dict[int, bytes], awaited: str) -> str:
        missing = [r for r in range(self.size) if r not in answers]
        if not missing:
            return "all ranks have answered"
        have = "has" if len(missing) == 1 else "have"
        return f"{ranks_text(missing)} {have} not {awaited or 'answered'}"

    def _collect(self, board: Any, key: str, answers: dict[int, bytes]) -> bool:
        found = False
        for rank in range(self.size):
            name = f"{key}/{rank}"
            if rank not in answers and (answer := self._read(board, name)) is not None:
                answers[rank] = answer
                board.delete_key(name)
                found = True
        return found

    def ask(
        self,
        key: str,
        value: bytes,
        decide: Callable[[list[bytes]], bytes],
        deadline_s: float | None = None,
        awaited: str = "",
    ) -> bytes:
        """Return on every rank what `decide` returns on rank 0 for the values of all ranks.  Blocks.

        If `decide` raises, or ranks are missing, all ranks raise the same error.  `awaited`: as for
        `gather`.
        """
        limit = self.deadline_s if deadline_s is None else deadline_s
        if self.rank == 0:
            return self._decide(key, value, decide, limit, awaited)
        self.post(f"{key}/{self.rank}", value, limit)
        with self._waiting(lambda: f"rank 0 has not said that all have {awaited or 'answered'}"):
            answer = self._wait(key, limit + _ANSWER_S, awaited)
        if answer[:1] == b"\1":
            raise decode_error(answer[1:], rank=0)
        return answer[1:]

    def _decide(
        self,
        key: str,
        value: bytes,
        decide: Callable[[list[bytes]], bytes],
        limit: float,
        awaited: str,
    ) -> bytes:
        self.post(f"{key}/alive", b"")
        try:
            answer = decide(self.gather(key, value, limit, awaited))
        except Exception as error:
            self.post(f"{key}/answer", b"\1" + encode_error(error))
            raise
        self.post(f"{key}/answer", b"\0" + answer)
        self._forget(key)
        return answer

    def _in_vain(self, missing: list[int], limit: float, awaited: str) -> str:
        who, have = ranks_text(missing), "has" if len(missing) == 1 else "have"
        if self._leaving:
            return f"{who} had not answered when this process came to its end"
        if awaited:
            return f"{who} {have} not {awaited} within {limit:g} s"
        return f"{who} did not answer within {limit:g} s"

    def abort_waits(self) -> None:
        """End every wait for a message that is not there, now and later, with Deadline."""
        self._leaving = True

    def _forget(self, key: str) -> None:
        """Delete the answer to `family/n-1`: every rank that answered `family/n` has read it."""
        family, _, number = key.rpartition("/")
        old, self._answered[family] = self._answered.get(family), key
        if old is not None and number:

            def forget(board: Any) -> None:
                board.delete_key(f"{old}/answer")
                board.delete_key(f"{old}/alive")

            self._ask(f"forget {old}", forget)

    def close(self, limit_s: float | None = None) -> None:
        """Leave the board.  Rank 0, its host, blocks until all have left, `limit_s` seconds at most, by
        default `_LEAVE_S`."""
        if self._line is None:
            return
        limit_s = min(self.deadline_s, _LEAVE_S if limit_s is None else limit_s)
        try:
            if self.rank == 0:
                self.gather("bye", b"", limit_s)
            else:
                self.post(f"bye/{self.rank}", b"", limit_s)
        except AgentError:
            pass  # a lost rank does not need the board
        line, self._lost, self._line = self._line, self._line.lost, None
        line.close()


def _place(size: int) -> tuple[str, int, int | None]:
    """Return a board's address, port and listening socket; None: torch listens at all addresses.

    If all ranks are on this node, as the launcher states, only processes of the node can connect, where
    torch's store takes a listening socket.
    """
    from holdfast.base.address import own_address

    if os.environ.get("LOCAL_WORLD_SIZE") != str(size):
        return os.environ.get("HOLDFAST_HOST") or own_address(), 0, None
    if not TAKES_LISTENER:
        return "127.0.0.1", 0, None
    listener = socket.create_server(("127.0.0.1", 0), backlog=max(128, size))
    host, port = listener.getsockname()
    return host, port, listener.detach()


def _closed(host: str, problem: str) -> AgentError:
    return AgentError(
        f"rank 0 cannot open a port for messages on {host!r}: {problem}",
        rank=0,
        hint="set HOLDFAST_HOST on rank 0 to an address that the other ranks can reach",
    )
