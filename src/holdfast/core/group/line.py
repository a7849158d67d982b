"""A line: questions to a torch store that end, whatever becomes of the process that hosts it.

A torch store waits for its host without a limit: while that process is stopped, `check` and `get` do not
return.  So a thread of the line's own asks, and whoever wanted to know waits for that thread no longer than
it may.  A question that is given up before it was put is dropped.  When the host goes on, so does the line.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist

from holdfast.base.errors import AgentError, Deadline
from holdfast.base.threads import result_of

T = TypeVar("T")
_Question = tuple[Callable[[Any], Any], Future[Any]]

EXIT_S = 1.0
"""Seconds that a store may take, when Python ends, for the questions before."""

_lines: weakref.WeakSet[StoreLine] = weakref.WeakSet()


class StoreLine:
    """Questions to one store, one after the other; from any thread."""

    def __init__(self, connect: Callable[[], Any], host: str, rank: int | None) -> None:
        """`connect` gives the store, on the line's thread.  `host`: who is to blame if it does not answer,
        and its `rank`, if it is one."""
        self.host = host
        self.rank = rank
        self.lost = ""
        """Why nobody shall ask any more; empty: it may be asked."""
        self._questions: SimpleQueue[_Question | None] = SimpleQueue()
        self._connect: Callable[[], Any] | None = connect
        self._starting = threading.Lock()
        self._end = weakref.finalize(self, self._questions.put, None)
        self._end.atexit = False
        _lines.add(self)

    def ask(self, what: str, question: Callable[[Any], T], limit_s: float) -> T:
        """Return what `question` returns, given the store.

        Deadline if the host does not answer within `limit_s`, AgentError if it is gone.
        """
        if self.lost:
            raise AgentError(f"{self.lost} ({what})")
        answer: Future[T] = self._put(question)

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
        """Ask as soon as the host answers, if it ever does; nobody waits for it."""
        if not self.lost:
            self._put(question)

    def _put(self, question: Callable[[Any], Any]) -> Future[Any]:
        with self._starting:
            connect, self._connect = self._connect, None
            if connect is not None:
                target, about = _answer, (self._questions, connect)
                threading.Thread(
                    target=target, args=about, name="holdfast-line", daemon=True
                ).start()
        answer: Future[Any] = Future()
        self._questions.put((question, answer))
        return answer

    def settle(self, limit_s: float) -> None:
        """Wait until the questions before are answered, but no longer than `limit_s`."""
        if self._connect is None:
            with suppress(AgentError, Deadline):
                self.ask("at the end", lambda _: None, limit_s)

    def close(self) -> None:
        """Let go of the store, when the questions before are answered."""
        self._end()


def _answer(questions: SimpleQueue[_Question | None], connect: Callable[[], Any]) -> None:
    """Answer questions until None comes."""
    store, lost = None, None
    try:
        store = connect()
    except BaseException as error:
        lost = error
    while (one := questions.get()) is not None:
        question, answer = one
        if not answer.set_running_or_notify_cancel():
            continue
        try:
            if lost is not None:
                raise lost
            answer.set_result(question(store))
        except BaseException as error:
            answer.set_exception(error)
        del one, question, answer


def lose_all(why: str) -> None:
    """From now on every line there is says at once that it is lost."""
    for line in _every_line():
        line.lost = why


def _every_line() -> tuple[StoreLine, ...]:
    while True:
        with suppress(RuntimeError):  # another thread makes one in this moment
            return tuple(_lines)


def _settle_all() -> None:
    """Leave no thread of ours inside torch: it would call `std::terminate` if Python is gone when the store
    has answered, and the process would end with SIGABRT."""
    until = time.monotonic() + EXIT_S
    for line in _every_line():
        line.settle(max(until - time.monotonic(), 0.0))


atexit.register(_settle_all)


def bounded(work: Callable[[], T], limit_s: float, late: Callable[[], Exception]) -> T:
    """Return or raise what `work` does.  After `limit_s` seconds it is left to itself, and `late()` raised.

    For what torch begins and nothing can interrupt.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="holdfast-bounded", daemon=True).start()
    return result_of(answer, limit_s, late)
