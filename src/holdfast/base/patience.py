"""Bounds on what storage may take: a frozen file system or a hung server must not hang the training.

The kernel cannot be interrupted in a call on a file system that does not answer; the thread that made the
call is lost until it does.  So the thread that must not be lost does not make it:

    training thread ---- operation ----> helper thread ----> the kernel
          |  waits `limit_s`                  |
          '---> Deadline "put 'steps/...': storage has not answered for 600 s"

An operation that was given up may still take effect when storage comes back.  Until then its store answers
every further operation with the same error at once, so that neither time nor threads add up; when it has
ended, the store is asked again.  What there is to tidy up is left to the thread that comes back
(`Patience.tidy`).

Threads that somebody else watches (`holdfast.base.threads.in_threads`) make their calls themselves: what is
under way is noted by thread, and whoever waits for them looks at how long it has been (`ThreadWatch`).
So a large read or write pays for no helper; any other operation pays some 20 microseconds.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from types import FrameType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from holdfast.base.calls import CallThread, is_done
from holdfast.base.errors import Deadline, HoldfastError, waiting

P = ParamSpec("P")
R = TypeVar("R")

PATIENCE_S = 600.0
"""Seconds that one operation of storage may take where nobody has said otherwise."""


class StorageCall:
    """One call of storage: what it is, since when it is under way, and whether it is over, or left behind:
    nobody waits for it any more."""

    __slots__ = ("is_left", "is_over", "limit_s", "patience", "place", "since", "what")

    def __init__(self, what: str, place: str, patience: Patience) -> None:
        self.what = what
        self.place = place
        self.patience = patience
        self.limit_s = patience.limit_s
        self.since = time.monotonic()
        self.is_over = False
        self.is_left = False

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
    """Limits that hold for one thread."""

    is_watched = False
    """Somebody else looks at how long its operations take."""
    watch: ThreadWatch | None = None
    """The `ThreadWatch` that does so, for one of several threads."""
    until: float | None = None
    """Time at which its operations have to be done, by `time.monotonic`."""
    limit_s = PATIENCE_S
    """Seconds that an operation may take, for stores that the thread opens."""


_thread = _Thread()
_under_way: dict[int, StorageCall] = {}
"""Operations by thread: storage is a resource of the process, and who waits asks for all of it."""
_idle: list[CallThread] = []
"""Threads that make calls of storage, and have none now."""
_lock = threading.Lock()
"""Guards what is noted as over and as left behind."""
os.register_at_fork(after_in_child=_under_way.clear)
os.register_at_fork(after_in_child=_idle.clear)  # their threads are the parent's
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


class Patience:
    """Limits how long each operation of one store may take.  Thread-safe.

    `limit_s` is None: for ever, unless the caller is `within` a limit of its own.
    """

    __slots__ = ("_stuck", "_untidy", "limit_s")

    def __init__(self) -> None:
        self.limit_s: float | None = _thread.limit_s
        self._stuck: list[StorageCall] = []
        """Operations that are left behind and not over."""
        self._untidy: list[Callable[[], object]] = []
        """Calls to make when all of those operations are over."""

    def run(
        self,
        call: Callable[[], R],
        what: str,
        place: str,
        undo: Callable[[Any], object] | None = None,
    ) -> R:
        """Do `call`.  Deadline if it has not returned after `limit_s`; it may return later, and `undo` is
        given what nobody takes then."""
        operation = StorageCall(what, place, self)
        limit_s = self._limit_s()
        if limit_s is None or _thread.is_watched:
            return _do(operation, call, undo)
        self._check()
        try:
            helper = _helper()
        except RuntimeError:  # no thread can be begun: when Python ends, or the host has no more
            return _do(operation, call, undo)
        frames = [sys._getframe()]
        try:
            done = helper.submit(_watched, partial(_do, operation, call, undo), frames)
            if not is_done(done, limit_s):
                if self._leave(operation):
                    raise operation.given_up()
                is_done(done, None)
        except BaseException:  # also of a signal, or of a rank that is told to leave
            operation.is_left = True
            helper.end()
            raise
        finally:
            frames.clear()
        _idle.append(helper)
        return done.result()

    def tidy(self, call: Callable[[], object], what: str, place: str) -> None:
        """Do `call`, which is about what nobody needs any more: while something is left behind, the thread
        that comes back last does it, and this one goes on."""
        with _lock:
            if self._stuck:
                self._untidy.append(call)
                return
        self.run(call, what, place)

    def _leave(self, operation: StorageCall, *, always: bool = False) -> bool:
        """Wait for it no more, unless by now it is over: then False.  The store is not asked again until it
        is, if it took as long as it may or `always`."""
        with _lock:
            if operation.is_over:
                return False
            operation.is_left = True
            if always or (self.limit_s is not None and operation.took_s >= self.limit_s):
                self._stuck.append(operation)
            return True

    def _over(self, operation: StorageCall) -> list[Callable[[], object]]:
        """Note that an operation is over; return the calls that are to tidy up now."""
        with _lock:
            operation.is_over = True
            if operation not in self._stuck:
                return []
            self._stuck.remove(operation)
            untidy: list[Callable[[], object]] = []
            if not self._stuck:
                untidy, self._untidy = self._untidy, untidy
            return untidy

    def _limit_s(self) -> float | None:
        if _thread.until is None:
            return self.limit_s
        left_s = max(_thread.until - time.monotonic(), 0.01)
        return left_s if self.limit_s is None else min(left_s, self.limit_s)

    def _check(self) -> None:
        """Deadline while an operation that was given up is still under way."""
        for operation in self._stuck[:1]:
            raise operation.given_up()


def _do(operation: StorageCall, call: Callable[[], R], undo: Callable[[Any], object] | None) -> R:
    """Do `call`.  Whoever was left behind meanwhile does nothing with what it returns: its Deadline."""
    me = threading.get_ident()
    around = _under_way.get(me)
    _under_way[me] = operation
    untidy: list[Callable[[], object]] = []
    try:
        try:
            if _thread.watch is not None and _thread.watch.is_over:
                raise operation.given_up()
            result = call()
        finally:
            untidy = operation.patience._over(operation)
        if operation.is_left:
            if undo is not None:
                undo(result)
            raise operation.given_up()
        return result
    finally:
        if around is None:
            _under_way.pop(me, None)
        else:
            _under_way[me] = around
        for tidy in untidy:
            with suppress(HoldfastError, OSError):
                tidy()


def _helper() -> CallThread:
    try:
        return _idle.pop()
    except IndexError:
        return CallThread("holdfast-storage")


def _watched(call: Callable[[], R], frames: list[FrameType]) -> R:
    """Make a call on a helper thread, for a thread with these frames, which looks at how long it takes."""
    _thread.is_watched, waiting.frames = True, frames
    return call()


def bounded(call: Callable[[], R], what: str, place: str, limit_s: float | None = None) -> R:
    """Do `call`, which asks storage otherwise than by a store, or several times.  Deadline after
    `limit_s`, or as long as an operation of a store may take."""
    patience = Patience()
    patience.limit_s = patience.limit_s if limit_s is None else limit_s
    return patience.run(call, what, place)


@contextmanager
def opening(limit_s: float) -> Iterator[None]:
    """Let each operation of a store that is opened in this block take `limit_s` seconds at most."""
    before, _thread.limit_s = _thread.limit_s, limit_s
    try:
        yield
    finally:
        _thread.limit_s = before


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Let all operations of this thread in this block together take `limit_s` seconds at most."""
    before, until = _thread.until, time.monotonic() + limit_s
    _thread.until = until if before is None else min(before, until)
    try:
        yield
    finally:
        _thread.until = before


class ThreadWatch:
    """Threads that one other thread waits for: it looks at how long their operations take, and gives up on
    all of them together.

    None of them does anything more then: it raises as soon as its operation is over, or it begins another.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._members: set[int] = set()

    @contextmanager
    def over_this_thread(self) -> Iterator[None]:
        """Note, in this block, that this thread is being waited for."""
        before, me = (_thread.is_watched, _thread.watch), threading.get_ident()
        _thread.is_watched, _thread.watch = True, self
        self._members.add(me)
        try:
            yield
        finally:
            self._members.discard(me)
            _thread.is_watched, _thread.watch = before

    def check(self) -> None:
        """Deadline if an operation takes longer than it may: all threads are left behind."""
        for operation in self._under_way():
            if operation.limit_s is not None and operation.took_s > operation.limit_s:
                self._give_up(operation)

    def _give_up(self, late: StorageCall) -> None:
        if not late.patience._leave(late):
            return
        self.is_over = True
        for operation in self._under_way():
            if not operation.is_left:
                operation.patience._leave(operation, always=True)
        raise late.given_up()

    def _under_way(self) -> list[StorageCall]:
        found = [_under_way.get(member) for member in tuple(self._members)]
        return [operation for operation in found if operation is not None]


def slowest(least_s: float = 1.0, of: Patience | None = None) -> str:
    """Name the operation under way for longest, for messages; empty if none has taken `least_s`.  `of`: of
    one store alone."""
    asked = [one for one in tuple(_under_way.values()) if of is None or one.patience is of]
    late = [one for one in asked if one.took_s >= least_s]
    return str(min(late, key=lambda one: one.since)) if late else ""


class Asks(Protocol):
    """Whatever asks storage: a store, a reader, a writer."""

    @property
    def patience(self) -> Patience:
        """The limits to how long its operations may take."""

    def place_of(self, key: str) -> str:
        """Return the place that operations on `key` are about, for messages."""


S = TypeVar("S", bound=Asks)


def patient(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a method an operation of storage; its first argument, if it is a text, is the key."""
    return patient_or(None)(method)


class Decorator(Protocol):
    """Makes a patient method of a method."""

    def __call__(
        self, method: Callable[Concatenate[S, P], R], /
    ) -> Callable[Concatenate[S, P], R]: ...


def patient_or(undo: Callable[[Any], object] | None) -> Decorator:
    """`patient` for what returns something to close: `undo` closes what nobody takes any more."""

    def decorate(method: Callable[Concatenate[S, P], R], /) -> Callable[Concatenate[S, P], R]:
        name = method.__name__

        @wraps(method)
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            key = args[0] if args else ""
            place = self.place_of(key if isinstance(key, str) else "")
            return self.patience.run(partial(method, self, *args, **kwargs), name, place, undo)

        return call

    return decorate
