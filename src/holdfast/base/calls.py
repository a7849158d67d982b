"""A thread that makes calls for others, who may give up waiting for them.

Nothing interrupts a thread that is inside the kernel or inside torch: it may be there for ever.  So the
thread that must not be lost has another one make the call, and waits for its result as long as it likes:

    caller ---- submit ---> promise, call ---> the thread, one call after the other
      |  result_of(promise, limit_s, late)            |
      '---> what the call returns or raises; or, after `limit_s`, the error that `late` makes

A call that is given up may still take effect; one that is cancelled before it begins is dropped.  Storage
is asked like this (`holdfast.base.storage_deadlines`), and so are torch's stores, groups and rendezvous;
`holdfast.base.threads.Worker` is such a thread for work that is begun and not waited for.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from queue import Empty, SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Promise(Generic[T]):
    """What a call returns or raises: a future that calls nobody back, for two thirds of a future's time."""

    __slots__ = ("_begun", "_error", "_over", "_result", "_waiting")

    def __init__(self) -> None:
        self._begun, self._waiting = threading.Lock(), threading.Lock()
        self._waiting.acquire()
        self._over = False
        self._error: BaseException | None = None

    def set_running_or_notify_cancel(self) -> bool:
        """Begin the call; False if it was cancelled."""
        return self._begun.acquire(blocking=False)

    def cancel(self) -> bool:
        """Drop the call; False if it has begun, or was dropped before."""
        is_dropped = self.set_running_or_notify_cancel()
        if is_dropped:
            self.set_exception(CancelledError())
        return is_dropped

    def set_result(self, result: T) -> None:
        """End the call with what it returns."""
        self._result = result
        self._end()

    def set_exception(self, error: BaseException) -> None:
        """End the call with what it raises."""
        self._error = error
        self._end()

    def _end(self) -> None:
        self._over = True
        self._waiting.release()

    def done(self) -> bool:
        """Whether the call has ended, or was dropped."""
        return self._over

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for what the call raises, None if it returns.  TimeoutError after `timeout` seconds."""
        if not self._over:
            if not self._waiting.acquire(timeout=-1 if timeout is None else max(timeout, 0.0)):
                raise FutureTimeout
            self._waiting.release()  # for others that wait
        return self._error

    def result(self, timeout: float | None = None) -> T:
        """Wait for what the call returns, or raise what it does.  TimeoutError after `timeout` seconds."""
        error = self.exception(timeout)
        if error is None:
            return self._result
        try:
            raise error
        finally:
            del error, self  # else the error's own traceback would hold it, until it is collected


_Call = tuple[Promise[Any] | Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]
_Calls = SimpleQueue[_Call | None]


class CallThread:
    """One daemon thread that makes calls in order; it ends with the object, or when it is told to."""

    def __init__(
        self, name: str, between: Callable[[], float] | None = None, pause_s: float | None = None
    ) -> None:
        """`between` is called when the thread was given nothing for `pause_s`, or for as long as it has
        returned last.  RuntimeError if no thread can be begun: Python ends, or the host has no more."""
        self._calls: _Calls = SimpleQueue()
        about = self._calls, between, pause_s
        self.thread = threading.Thread(target=_make, args=about, name=name, daemon=True)
        self.thread.start()
        self._end = weakref.finalize(self, self._calls.put, None)
        self._end.atexit = False

    @property
    def has_ended(self) -> bool:
        """Whether `end` was called."""
        return not self._end.alive

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Promise[T]:
        """Have the thread make a call, behind those before.  Returns at once; RuntimeError after `end`."""
        promise: Promise[T] = Promise()
        self.put(promise, call, *args, **kwargs)
        return promise

    def put(
        self,
        promise: Promise[T] | Future[T],
        call: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """`submit`, for a promise of the caller's own: a future tells others, too."""
        if self.has_ended:
            raise RuntimeError(f"{self.thread.name} takes no more calls")
        self._calls.put((promise, call, args, kwargs))

    def end(self) -> None:
        """Have the thread end, when it has made the calls that it was given.  Nobody waits for it."""
        self._end()


def _make(calls: _Calls, between: Callable[[], float] | None, pause_s: float | None) -> None:
    """Make calls until None comes.  What they were given is let go before anybody hears of the result."""
    while True:
        try:
            task = calls.get(timeout=pause_s)
        except Empty:
            assert between is not None
            pause_s = between()
            continue
        if task is None:
            return
        promise, call, args, kwargs = task
        del task
        if not promise.set_running_or_notify_cancel():
            continue
        try:
            result = call(*args, **kwargs)
        except BaseException as error:
            del call, args, kwargs
            promise.set_exception(error)
        else:
            del call, args, kwargs
            promise.set_result(result)
            del result
        del promise


def result_of(
    promise: Promise[T] | Future[T], limit_s: float | None, late: Callable[[], Exception]
) -> T:
    """Return or raise what a call does; raise `late()` if it is not done within `limit_s` seconds.

    A TimeoutError that the call itself has raised is not mistaken for the end of the wait.
    """
    if not is_done(promise, limit_s):
        raise late()
    return promise.result()


def is_done(promise: Promise[Any] | Future[Any], limit_s: float | None) -> bool:
    """Wait until a call has ended; True if that came within `limit_s` seconds."""
    try:
        promise.exception(limit_s if limit_s is None else min(limit_s, threading.TIMEOUT_MAX))
    except (FutureTimeout, TimeoutError):  # two classes before Python 3.11
        return promise.done()
    except CancelledError:
        pass
    return True


def call_within(call: Callable[[], T], limit_s: float, late: Callable[[], Exception]) -> T:
    """Return or raise what a call does.  After `limit_s` seconds it is left to itself, and `late()` raised.

    For what is begun seldom: a thread is made for it.
    """
    return result_of(CallThread("holdfast-call").submit(call), limit_s, late)
