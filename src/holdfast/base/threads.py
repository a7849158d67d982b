"""Background threads, in parallel or one after the other, and their end when Python ends.

All of them are daemons: Python waits for other threads when it ends, and a thread blocked in storage would
hold it up for ever.  Instead, work that has begun may continue for `EXIT_S` seconds, and the module that
began it reports the dropped work (`at_exit`).
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from holdfast.base.calls import CallThread, is_done, result_of
from holdfast.base.errors import need
from holdfast.base.storage_deadlines import ThreadWatch

_P = ParamSpec("_P")
_T = TypeVar("_T")

EXIT_S = 60.0
"""Seconds that work in progress may continue when Python ends."""
_LOOK_S = 0.5
STOP_S = 5.0
"""Seconds that a caller who is interrupted waits for threads that are still at work for it."""

_unfinished: dict[Future[Any], threading.Thread] = {}
"""Work that Python waits for when it ends, with the thread of its worker; there is one end of Python."""
_before: list[Callable[[], None]] = []
_endings: list[Callable[[float], None]] = []


class ThreadPages(threading.local):
    """Reusable, page-aligned scratch memory of each thread."""

    view: memoryview | None = None

    def get(self, size: int) -> memoryview:
        """Return `size` bytes of undefined content."""
        if self.view is None or len(self.view) < size:
            self.view = memoryview(mmap.mmap(-1, max(size, 1)))
        return self.view[:size]


class Worker:
    """One thread that does what it is given, in order; Python waits for that when it ends.

    It ends after its tasks, once the object is gone or `shutdown` was called.
    """

    def __init__(self, name: str) -> None:
        self._calls = CallThread(name)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until all tasks are done."""
        self.shutdown()
        self._calls.thread.join()

    def submit(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Returns at once.  RuntimeError after `shutdown`."""
        future: Future[_T] = Future()
        self._calls.put(future, work, *args, **kwargs)
        _unfinished[future] = self._calls.thread
        future.add_done_callback(_forget_one)
        return future

    def settle(self, limit_s: float | None) -> None:
        """Wait until all is done that it was given so far.  TimeoutError."""
        mine = [one for one, thread in tuple(_unfinished.items()) if thread is self._calls.thread]
        if not all(one.done() for one in mine):
            result_of(self.submit(lambda: None), limit_s, TimeoutError)

    def shutdown(self) -> None:
        """Take no more work.  What was given is done, but nobody waits for it when Python ends."""
        self._calls.end()
        for future, thread in tuple(_unfinished.items()):
            if thread is self._calls.thread:
                _forget_one(future)


def step_back(niceness: int) -> None:
    """Give this thread a lower priority than the training, where threads have priorities."""
    with suppress(OSError, AttributeError):  # only Linux has them
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def _forget_one(future: Future[Any]) -> None:
    _unfinished.pop(future, None)


# -- side by side ---------------------------------------------------------------------------------


def in_threads(
    work: Callable[[Any], None], items: list[Any], threads: int, *, fills: bool = False
) -> None:
    """Call `work` for every item from several threads; the first error, or an interrupt, stops the rest.

    Deadline if storage does not answer one of the threads; that thread is abandoned.  `fills`: they write
    into memory of the caller, so none is at work any more after an interrupt; one that needs more than
    `STOP_S` seconds for its item is abandoned.
    """
    if threads == 1 or len(items) < 2:
        for item in items:
            work(item)
        return
    crew = _Crew(work, items)
    try:
        crew.start(min(threads, len(items)))
        crew.wait()
    except BaseException:
        crew.stop()
        if fills:
            crew.leave_in(STOP_S)
        raise


class _Crew:
    """Threads that share a list of items."""

    def __init__(self, work: Callable[[Any], None], items: list[Any]) -> None:
        self._work = work
        self._todo = iter(items)
        self._members: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._stop = False
        self._error: BaseException | None = None
        self._left = 0
        self._done = threading.Event()
        self._watch = ThreadWatch()

    def start(self, size: int) -> None:
        has_begun = False
        for _ in range(size):
            member = threading.Thread(target=self._drain, name="holdfast-io", daemon=True)
            self._members.append(member)
            with self._lock:
                self._left += 1
            try:
                member.start()
            except RuntimeError:  # Python is ending, or the host has no more threads
                with self._lock:
                    self._left -= 1
                break
            has_begun = True
        if not has_begun:
            self._left = 1
            self._drain()

    def wait(self) -> None:
        look_s = 0.01
        while not self._done.wait(look_s):
            look_s = min(2 * look_s, _LOOK_S)
            self._watch.check()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Have each thread end after what it is at.  Returns at once."""
        self._stop = True

    def leave_in(self, limit_s: float) -> None:
        """Wait for the threads to end; abandon those that do not within `limit_s`."""
        until = time.monotonic() + limit_s
        for member in self._members:
            while member.is_alive() and not self._watch.is_over:
                if time.monotonic() >= until:
                    self._watch.leave()
                member.join(0.01)

    def _drain(self) -> None:
        try:
            with self._watch.over_this_thread():
                self._go()
        except BaseException as error:
            with self._lock:
                self._stop, self._error = True, self._error or error
        finally:
            with self._lock:
                self._left -= 1
                if not self._left:
                    self._done.set()

    def _go(self) -> None:
        while not self._stop and not self._watch.is_over:
            with self._lock:
                items = [item for item in (next(self._todo, self),) if item is not self]
            if not items:
                return
            self._work(items[0])


# -- when Python ends -----------------------------------------------------------------------------


def before_exit(work: Callable[[], None]) -> Callable[[], None]:
    """Call `work` on the main thread when Python ends, before the wait for work in progress.  Returns a
    function that cancels it."""
    return _listed(_before, work)


def at_exit(ending: Callable[[float], None]) -> Callable[[], None]:
    """Call `ending(seconds waited)` when Python ends, after the work in progress or `EXIT_S` seconds.
    Returns a function that cancels it."""
    return _listed(_endings, ending)


def _listed(works: list[_T], work: _T) -> Callable[[], None]:
    works.append(work)

    def cancel() -> None:
        if work in works:
            works.remove(work)

    return cancel


def idle(limit_s: float) -> bool:
    """Wait until all workers are idle; False if they are not within `limit_s`."""
    until = time.monotonic() + limit_s
    while unfinished := tuple(_unfinished):
        for future in unfinished:
            if not is_done(future, until - time.monotonic()):
                return False
            _forget_one(future)
    return True


def _when_python_ends() -> None:
    since = time.monotonic()
    for work in tuple(_before):
        work()
    try:
        idle(EXIT_S)
    finally:  # Ctrl-C ends the wait
        for ending in tuple(_endings):
            try:
                ending(time.monotonic() - since)
            except BaseException as error:  # the other endings must still run
                traceback.print_exception(error)


def _forget() -> None:
    """Forget work and endings: a forked child has none of its parent's threads."""
    _unfinished.clear()
    _endings.clear()


os.register_at_fork(after_in_child=_forget)
(_register_atexit,) = need("Python", threading, "_register_atexit")
with suppress(RuntimeError):  # imported when Python is ending already
    _register_atexit(_when_python_ends)
