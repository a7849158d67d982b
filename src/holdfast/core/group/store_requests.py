"""Requests to a torch store with a deadline that holds even if the host of the store is stopped.

A torch store waits for its host without a limit: while that process is stopped, `check` and `get` do not
return.  So the thread of a `StoreLine` sends the requests, and the caller waits for that thread until its
deadline.  A request that is given up before it was sent is dropped.  When the host continues, so does the
line.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist

from holdfast.base.calls import CallThread, Promise, is_done, result_of
from holdfast.base.errors import AgentError, Deadline

_T = TypeVar("_T")

_EXIT_S = 1.0
"""Seconds in which a store must answer the pending questions at exit."""

_THREAD = "holdfast-line"

_lines: weakref.WeakSet[StoreLine] = weakref.WeakSet()
"""Open lines."""


class StoreLine:
    """Questions to one store, one after the other; from any thread."""

    def __init__(self, connect: Callable[[], Any], host: str, rank: int | None) -> None:
        """`connect` returns the store; it runs on the line's thread.  `host`: the name of the store's
        host in errors, and its `rank`, if it has one."""
        self.host = host
        self.rank = rank
        self.lost = ""
        """Reason why `ask` raises AgentError at once; else empty."""
        self._connect = connect
        self._asker: CallThread | None = None
        self._store: Promise[Any]
        self._putting = threading.Lock()
        _lines.add(self)

    def ask(self, what: str, question: Callable[[Any], _T], limit_s: float) -> _T:
        """Return what `question` returns, given the store.

        Deadline if the host does not answer within `limit_s`, AgentError if it is gone, or the line closed.
        """
        answer: Promise[_T] | None = self._put(question)
        if answer is None:
            raise AgentError(f"{self.lost} ({what})")

        def late() -> Deadline:
            answer.cancel()
            return Deadline(
                f"{self.host} did not answer within {limit_s:.3g} s ({what})",
                rank=self.rank,
                hint="look at the log of that process; it may have died, or hang",
            )

        try:
            return result_of(answer, max(limit_s, 0.0), late)
        except (RuntimeError, dist.DistError) as error:
            raise AgentError(
                f"{self.host} is gone ({what}: {error})",
                rank=self.rank,
                hint="that process has ended or the network is down; its log says more",
            ) from error

    def leave_word(self, question: Callable[[Any], object]) -> None:
        """Ask once the host answers, if it ever does; does not block."""
        self._put(question)

    def _put(self, question: Callable[[Any], Any]) -> Promise[Any] | None:
        """Have the thread ask; None if the line is lost."""
        with self._putting:
            if self.lost:
                return None
            if self._asker is None:
                self._asker = CallThread(_THREAD)
                self._store = self._asker.submit(self._connect)
            store = self._store
            return self._asker.submit(lambda: question(store.result()))

    def settle(self, limit_s: float) -> threading.Thread | None:
        """Block until all earlier questions are answered, at most `limit_s`; return the thread."""
        if self._asker is None:
            return None
        last = self._put(lambda _: None)
        if last is not None:
            is_done(last, limit_s)
        return self._asker.thread

    def close(self) -> None:
        """Release the store once all earlier questions are answered; does not block."""
        with self._putting:
            _lines.discard(self)
            self.lost = self.lost or f"the connection to {self.host} is closed"
            if self._asker is not None:
                self._asker.end()


def lose_all(why: str) -> None:
    """Make every existing line raise AgentError, with this reason, at once."""
    for line in _every_line():
        line.lost = why


def _every_line() -> tuple[StoreLine, ...]:
    while True:
        with suppress(RuntimeError):  # another thread adds one at this moment
            return tuple(_lines)


def _settle_all() -> None:
    """Leave no thread of ours inside torch: it would call `std::terminate` if Python is gone when the store
    has answered, and the process would end with SIGABRT.  A line that is gone may have left one, too."""
    until = time.monotonic() + _EXIT_S
    settled = [line.settle(max(until - time.monotonic(), 0.0)) for line in _every_line()]
    for thread in threading.enumerate():
        if thread.name == _THREAD and thread not in settled:
            thread.join(max(until - time.monotonic(), 0.0))


atexit.register(_settle_all)
os.register_at_fork(after_in_child=_lines.clear)  # a forked child has none of their threads
