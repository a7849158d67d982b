"""Bounds on what storage may take: a frozen file system or a hung server must not hang the training.

The kernel cannot be interrupted in a call on a file system that does not answer; the thread that made the
call is lost until it does.  So the thread that must not be lost does not make it:

    training thread ---- operation ----> helper thread ----> the kernel
          |  waits `limit_s`                  |
          '---> Deadline "put 'steps/...': storage has not answered for 600 s"

An operation that was given up may still take effect when storage comes back.  Until then its store answers
every further operation with the same error at once, so that neither time nor threads add up; when it has
ended, the store is asked again.

Threads that somebody else watches (`holdfast.threads.in_threads`) make their calls themselves: what is
under way is noted by thread, and whoever waits for them looks at how long it has been (`overdue`).  So a
large read or write pays for no helper; any other operation pays 15 microseconds.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from queue import SimpleQueue
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from holdfast.errors import Deadline

P = ParamSpec("P")
R = TypeVar("R")

PATIENCE_S = 600.0
"""How long one operation of storage may take where nobody has said otherwise."""


class Operation:
    """One call of storage: what it is, since when it is under way, and whether it is over."""

    __slots__ = ("is_over", "limit_s", "patience", "place", "since", "what")

    def __init__(self, what: str, place: str, patience: Patience) -> None:
        self.what = what
        self.place = place
        self.patience = patience
        self.limit_s = patience.limit_s
        self.since = time.monotonic()
        self.is_over = False

    @property
    def took_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.since

    def __str__(self) -> str:
        return f"{self.what} '{self.place}': storage has not answered for {self.took_s:.3g} s"

    def given_up(self) -> Deadline:
        """The error of whoever waits for it no more."""
        return Deadline(
            str(self),
            hint="the file system is frozen, or its server does not answer; what was asked for may still "
            "happen when it comes back",
        )


class _Thread(threading.local):
    """What holds for one thread."""

    is_watched = False
    """Somebody else looks at how long its operations take."""
    until: float | None = None
    """When it has to be done, by `time.monotonic`."""
    limit_s = PATIENCE_S
    """Of stores that are opened."""


_thread = _Thread()
_under_way: dict[int, Operation] = {}
"""By thread: storage is a resource of the process, and who waits asks for all of it."""
_idle: list[Helper] = []
os.register_at_fork(after_in_child=_under_way.clear)
os.register_at_fork(after_in_child=_idle.clear)  # their threads are the parent's


class Patience:
    """How long operations of one store may take each.  Thread-safe.

    `limit_s` is None: for ever, unless the caller is `within` a limit of its own.
    """

    __slots__ = ("_stuck", "limit_s")

    def __init__(self) -> None:
        self.limit_s: float | None = _thread.limit_s
        self._stuck: list[Operation] = []

    def run(self, call: Callable[[], R], what: str, place: str) -> R:
        """Do `call`.  Deadline if it has not returned after `limit_s`; it may return later."""
        operation = Operation(what, place, self)
        limit_s = self._limit_s()
        if limit_s is None or _thread.is_watched:
            return _do(operation, call)
        self._check()
        try:
            helper = _helper()
        except RuntimeError:  # no thread can be begun: when Python ends, or the host has no more
            return _do(operation, call)
        if not helper.do(partial(_do, operation, call), limit_s):
            self.give_up(operation)
        result = helper.result()
        _idle.append(helper)
        if isinstance(result, BaseException):
            raise result
        return result[0]  # type: ignore[no-any-return]

    def give_up(self, operation: Operation) -> None:
        """Wait for it no more.  Raises its Deadline."""
        if self.limit_s is not None and operation.took_s >= self.limit_s:
            self._stuck.append(operation)
        raise operation.given_up()

    def _limit_s(self) -> float | None:
        if _thread.until is None:
            return self.limit_s
        left_s = max(_thread.until - time.monotonic(), 0.01)
        return left_s if self.limit_s is None else min(left_s, self.limit_s)

    def _check(self) -> None:
        """Deadline while an operation that was given up is still under way."""
        if self._stuck:
            self._stuck = [one for one in self._stuck if not one.is_over]
            for one in self._stuck[:1]:
                raise one.given_up()


def _do(operation: Operation, call: Callable[[], R]) -> R:
    me = threading.get_ident()
    around = _under_way.get(me)
    _under_way[me] = operation
    try:
        return call()
    finally:
        operation.is_over = True
        if around is None:
            _under_way.pop(me, None)
        else:
            _under_way[me] = around


def _helper() -> Helper:
    try:
        return _idle.pop()
    except IndexError:
        return Helper()


class Helper:
    """A thread that makes calls for another one, which may give up on it."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], threading.Lock]] = SimpleQueue()
        self._result: Any = None
        threading.Thread(target=self._work, name="holdfast-storage", daemon=True).start()

    def do(self, call: Callable[[], Any], limit_s: float) -> bool:
        """Whether it has returned within `limit_s`.  If not, this helper is of no more use."""
        done = threading.Lock()
        done.acquire()
        self._calls.put((call, done))
        return done.acquire(timeout=min(limit_s, threading.TIMEOUT_MAX))

    def result(self) -> Any:
        """What the call returned, as a tuple of one; or its error."""
        result, self._result = self._result, None
        return result

    def _work(self) -> None:
        _thread.is_watched = True
        while True:
            call, done = self._calls.get()
            try:
                self._result = (call(),)
            except BaseException as error:
                self._result = error
            del call
            done.release()
            del done


def bounded(call: Callable[[], R], what: str, place: str, limit_s: float | None = None) -> R:
    """Do `call`, which asks storage otherwise than by a store, or several times.  Deadline after
    `limit_s`, or as long as an operation of a store may take."""
    patience = Patience()
    patience.limit_s = patience.limit_s if limit_s is None else limit_s
    return patience.run(call, what, place)


@contextmanager
def opening(limit_s: float) -> Iterator[None]:
    """Stores that are opened in this block take so long for an operation at most."""
    before, _thread.limit_s = _thread.limit_s, limit_s
    try:
        yield
    finally:
        _thread.limit_s = before


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    """All operations of this thread in this block together may take so long."""
    before, until = _thread.until, time.monotonic() + limit_s
    _thread.until = until if before is None else min(before, until)
    try:
        yield
    finally:
        _thread.until = before


@contextmanager
def watched() -> Iterator[None]:
    """This thread is being waited for by somebody who calls `overdue`."""
    before, _thread.is_watched = _thread.is_watched, True
    try:
        yield
    finally:
        _thread.is_watched = before


def overdue(threads: Collection[int]) -> Operation | None:
    """An operation that one of these threads has under way for longer than its limit, if there is one."""
    for me in threads:
        operation = _under_way.get(me)
        limit_s = None if operation is None else operation.limit_s
        if operation is not None and limit_s is not None and operation.took_s > limit_s:
            return operation
    return None


def slowest(least_s: float = 1.0) -> str:
    """What storage has not answered for longest, for messages; empty if nothing takes `least_s`."""
    since = sorted(tuple(_under_way.values()), key=lambda operation: operation.since)
    return next((str(one) for one in since if one.took_s >= least_s), "")


class Asks(Protocol):
    """Whatever asks storage: a store, a reader, a writer."""

    @property
    def patience(self) -> Patience:
        """How long its operations may take."""

    def place_of(self, key: str) -> str:
        """What its operations are about, for messages."""


S = TypeVar("S", bound=Asks)


def patient(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """An operation of storage; its first argument, if it is a text, is the key."""
    name = method.__name__

    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        key = args[0] if args else ""
        place = self.place_of(key if isinstance(key, str) else "")
        return self.patience.run(partial(method, self, *args, **kwargs), name, place)

    return call
