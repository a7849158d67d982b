"""A thread that makes calls for others, who may give up waiting for them.

Nothing interrupts a thread that is inside the kernel or inside torch: it may be there for ever.  So the
thread that must not be lost has another one make the call, and waits for a future as long as it likes:

    caller ---- submit ----> future, call ----> the thread, one call after the other
      |  result_of(future, limit_s, late)            |
      '---> what the call returns or raises; or, after `limit_s`, the error that `late` makes

A call that is given up may still take effect; one that is cancelled before it begins is dropped.  Storage
is asked like this (`holdfast.base.patience`), and so are torch's stores, its groups and its rendezvous;
`holdfast.base.threads.Worker` is such a thread for work that is begun and not waited for.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_Call = tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]
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

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have the thread make a call, behind those before.  Returns at once; RuntimeError after `end`."""
        if self.has_ended:
            raise RuntimeError(f"{self.thread.name} takes no more calls")
        future: Future[T] = Future()
        self._calls.put((future, call, args, kwargs))
        return future

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
        future, call, args, kwargs = task
        del task
        if not future.set_running_or_notify_cancel():
            continue
        try:
            result = call(*args, **kwargs)
        except BaseException as error:
            del call, args, kwargs
            future.set_exception(error)
        else:
            del call, args, kwargs
            future.set_result(result)
            del result
        del future


def result_of(future: Future[T], limit_s: float | None, late: Callable[[], Exception]) -> T:
    """Return or raise what a future does; raise `late()` if it is not done within `limit_s` seconds.

    A TimeoutError that the call itself has raised is not mistaken for the end of the wait.
    """
    if not is_done(future, limit_s):
        raise late()
    return future.result()


def is_done(future: Future[Any], limit_s: float | None) -> bool:
    """Wait until a future is done; True if that came within `limit_s` seconds."""
    try:
        future.exception(limit_s if limit_s is None else min(limit_s, threading.TIMEOUT_MAX))
    except (FutureTimeout, TimeoutError):  # two classes before Python 3.11
        return future.done()
    except CancelledError:
        pass
    return True


def call_within(call: Callable[[], T], limit_s: float, late: Callable[[], Exception]) -> T:
    """Return or raise what a call does.  After `limit_s` seconds it is left to itself, and `late()` raised.

    For what is begun seldom: a thread is made for it.
    """
    return result_of(CallThread("holdfast-call").submit(call), limit_s, late)
