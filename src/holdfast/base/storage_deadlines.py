"""Time limits for storage: a frozen file system or a hung server must not hang the training.

A system call on a file system that does not answer cannot be interrupted; it blocks the calling thread
until the file system answers.  So the training thread lets a helper thread make the call:

    training thread ---- operation ----> helper thread ----> the kernel
          |  waits `limit_s`                  |
          '---> Deadline "put 'steps/...': storage has not answered for 600 s"

An abandoned operation may still take effect when storage comes back.  Until it has returned, its store
refuses every further operation with the same error at once, so neither waiting times nor threads
accumulate.  The helper thread that returns does the pending clean-up (`Patience.tidy`).

Threads that somebody else watches (`holdfast.base.threads.in_threads`) make their calls themselves: what is
under way is noted by thread, and whoever waits for them looks at how long it has been (`ThreadWatch`).
So a large read or write pays for no helper; any other operation pays some 15 microseconds.
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
from holdfast.base.errors import Deadline, HoldfastError, need, waiting

_P = ParamSpec("_P")
_R = TypeVar("_R")

_PATIENCE_S = 600.0
"""Default limit for one operation of storage, in seconds."""


class StorageCall:
    """A call of storage: its description and start time, whether it has returned (`is_over`), and whether
    its caller has stopped waiting (`is_left`)."""

    __slots__ = ("is_left", "is_over", "limit_s", "patience", "pid", "place", "since", "what")

    def __init__(self, what: str, place: str, patience: Patience) -> None:
        self.what = what
        self.place = place
        self.patience = patience
        self.limit_s = patience.limit_s
        self.since = time.monotonic()
        self.pid = os.getpid()
        self.is_over = False
        self.is_left = False

    @property
    def took_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.since

    def __str__(self) -> str:
        return f"{self.what} '{self.place}': storage has not answered for {self.took_s:.3g} s"

    def given_up(self) -> Deadline:
        """Return the error for a caller that stops waiting."""
        return Deadline(
            str(self),
            hint="the file system is frozen, or its server does not answer; the operation may still "
            "take effect when it comes back",
        )


class _Thread(threading.local):
    """Limits that hold for one thread."""

    is_watched = False
    """Another thread checks how long its operations take."""
    watch: ThreadWatch | None = None
    """The `ThreadWatch` that checks it, if it is one of several threads."""
    until: float | None = None
    """Deadline of all its operations, by `time.monotonic`."""
    limit_s = _PATIENCE_S
    """Seconds that an operation may take, for stores that the thread opens."""


_thread = _Thread()
_under_way: dict[int, StorageCall] = {}
"""Operations by thread: storage is a resource of the process, and who waits asks for all of it."""
_idle: list[CallThread] = []
"""Threads that make calls of storage, and have none now."""
_lock = threading.Lock()
"""Guards `is_over`, `is_left` and the lists of `Patience`."""
os.register_at_fork(after_in_child=_under_way.clear)
os.register_at_fork(after_in_child=_idle.clear)  # their threads are the parent's
os.register_at_fork(after_in_child=need("Python", _lock, "_at_fork_reinit")[0])


class Patience:
    """Limits how long each operation of one store may take.  Thread-safe.

    If `limit_s` is None there is no limit, except the caller's own (`within`).
    """

    __slots__ = ("_stuck", "_untidy", "limit_s")

    def __init__(self) -> None:
        self.limit_s: float | None = _thread.limit_s
        self._stuck: list[StorageCall] = []
        """Abandoned operations that have not returned."""
        self._untidy: list[Callable[[], object]] = []
        """Calls to make when all of those operations are over."""

    def run(
        self,
        call: Callable[[], _R],
        what: str,
        place: str,
        undo: Callable[[Any], object] | None = None,
    ) -> _R:
        """Do `call`.  Deadline if it has not returned after `limit_s`; if it returns later, `undo` gets its
        result."""
        operation = StorageCall(what, place, self)
        limit_s = self._limit_s()
        if limit_s is None or _thread.is_watched:
            return _do(operation, call, undo)
        self._check()
        try:
            helper = _helper()
        except RuntimeError:  # no thread can start: Python is ending, or the host is out of threads
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
        """Do `call`, a clean-up that nobody waits for.  While abandoned operations have not returned, the
        last of their threads does it instead, and this method returns at once."""
        with _lock:
            if self._awaited():
                self._untidy.append(call)
                return
        self.run(call, what, place)

    def _leave(self, operation: StorageCall, *, always: bool = False) -> bool:
        """Abandon an operation; False if it has returned meanwhile.  If it has used up its limit, or
        `always`, the store refuses further operations until it returns."""
        with _lock:
            if operation.is_over:
                return False
            operation.is_left = True
            if always or (self.limit_s is not None and operation.took_s >= self.limit_s):
                self._stuck.append(operation)
            return True

    def _over(self, operation: StorageCall) -> list[Callable[[], object]]:
        """Record that an operation has returned; return the clean-up calls that are due now."""
        with _lock:
            operation.is_over = True
            if operation not in self._stuck:
                return []
            self._stuck.remove(operation)
            untidy: list[Callable[[], object]] = []
            if not self._awaited():
                untidy, self._untidy = self._untidy, untidy
            return untidy

    def _limit_s(self) -> float | None:
        if _thread.until is None:
            return self.limit_s
        left_s = max(_thread.until - time.monotonic(), 0.01)
        return left_s if self.limit_s is None else min(left_s, self.limit_s)

    def _check(self) -> None:
        """Deadline while an abandoned operation has not returned."""
        for operation in self._awaited()[:1]:
            raise operation.given_up()

    def _awaited(self) -> list[StorageCall]:
        """Abandoned operations that have not returned and will: a forked child has none of its parent's
        threads."""
        return [one for one in tuple(self._stuck) if one.pid == os.getpid()]


def _do(operation: StorageCall, call: Callable[[], _R], undo: Callable[[Any], object] | None) -> _R:
    """Do `call`.  Deadline, and `undo` of the result, if the operation was abandoned meanwhile."""
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


def _watched(call: Callable[[], _R], frames: list[FrameType]) -> _R:
    """Make a call on a helper thread, for a thread with these frames, which looks at how long it takes."""
    _thread.is_watched, waiting.frames = True, frames
    return call()


def bounded(call: Callable[[], _R], what: str, place: str, limit_s: float | None = None) -> _R:
    """Do `call`, which uses storage without a store or makes several operations.  Deadline after `limit_s`,
    by default the limit of one operation."""
    patience = Patience()
    patience.limit_s = patience.limit_s if limit_s is None else limit_s
    return patience.run(call, what, place)


@contextmanager
def opening(limit_s: float) -> Iterator[None]:
    """Limit each operation of the stores that are opened in this block to `limit_s` seconds."""
    before, _thread.limit_s = _thread.limit_s, limit_s
    try:
        yield
    finally:
        _thread.limit_s = before


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Limit the operations of this thread in this block to `limit_s` seconds in total."""
    before, until = _thread.until, time.monotonic() + limit_s
    _thread.until = until if before is None else min(before, until)
    try:
        yield
    finally:
        _thread.until = before


class ThreadWatch:
    """Watches several threads for the thread that waits for them, which abandons all of them together.

    An abandoned thread does no more work: it raises when its current operation returns or the next begins.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._members: set[int] = set()

    @contextmanager
    def over_this_thread(self) -> Iterator[None]:
        """Watch the current thread in this block."""
        before, me = (_thread.is_watched, _thread.watch), threading.get_ident()
        _thread.is_watched, _thread.watch = True, self
        self._members.add(me)
        try:
            yield
        finally:
            self._members.discard(me)
            _thread.is_watched, _thread.watch = before

    def check(self) -> None:
        """Deadline if an operation has exceeded its limit; all threads are abandoned."""
        for operation in self._under_way():
            if operation.limit_s is not None and operation.took_s > operation.limit_s:
                self._give_up(operation)

    def _give_up(self, late: StorageCall) -> None:
        if not late.patience._leave(late):
            return
        self.leave(always=True)
        raise late.given_up()

    def leave(self, *, always: bool = False) -> None:
        """Abandon all threads.  `always`: their stores refuse further operations until those return."""
        self.is_over = True
        for operation in self._under_way():
            if not operation.is_left:
                operation.patience._leave(operation, always=always)

    def _under_way(self) -> list[StorageCall]:
        operations = (_under_way.get(member) for member in tuple(self._members))
        return [operation for operation in operations if operation is not None]


def slowest(least_s: float = 1.0, of: Patience | None = None) -> str:
    """Describe the longest current operation, for messages; empty if none has taken `least_s`.  `of` limits
    the search to one store."""
    calls = [call for call in tuple(_under_way.values()) if of is None or call.patience is of]
    late = [call for call in calls if call.took_s >= least_s]
    return str(min(late, key=lambda call: call.since)) if late else ""


class Asks(Protocol):
    """An object that uses storage: a store, a reader, a writer."""

    @property
    def patience(self) -> Patience:
        """The limits of its operations."""

    def place_of(self, key: str) -> str:
        """Return the place of `key`, for messages."""


_S = TypeVar("_S", bound=Asks)


def patient(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """Limit the time of a method by its object's `patience`; a text as first argument is the key."""
    return patient_or(None)(method)


class Decorator(Protocol):
    """Limits the time of a method."""

    def __call__(
        self, method: Callable[Concatenate[_S, _P], _R], /
    ) -> Callable[Concatenate[_S, _P], _R]: ...


def patient_or(undo: Callable[[Any], object] | None) -> Decorator:
    """`patient` for a method that returns a resource: `undo` closes it if the caller no longer waits."""

    def decorate(method: Callable[Concatenate[_S, _P], _R], /) -> Callable[Concatenate[_S, _P], _R]:
        name = method.__name__

        @wraps(method)
        def call(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
            key = args[0] if args else ""
            place = self.place_of(key if isinstance(key, str) else "")
            return self.patience.run(partial(method, self, *args, **kwargs), name, place, undo)

        return call

    return decorate
