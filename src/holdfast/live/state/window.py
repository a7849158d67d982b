"""The window of a snapshot: the time in which the training goes on and its weights are copied.

It lasts from the snapshot's call to the next optimizer step, whose hook waits for what is not copied yet.
A script may write weights in between.  Counters tell that a tensor was written (`writes`), but only when
the write is over: so they are read a second time after the copy, when the training thread comes to rest
(inside a call of this package, nothing is being written), or after a pause that is longer than a write.

A window goes through these phases:

    WAITING -> COPYING -> COPIED -> OVER      COPIED: not looked at again yet
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch

from holdfast.base.events import span
from holdfast.base.threads import before_exit
from holdfast.live.state.devices import join_streams, note_streams
from holdfast.live.state.graphs import before_capture, is_capturing
from holdfast.live.state.observer import after_every_step, before_every_step

if TYPE_CHECKING:
    from holdfast.live.state.carrying import CarriedCopies


class Phase(Enum):
    WAITING = auto()
    """The copy has not begun."""
    COPYING = auto()
    COPIED = auto()
    """The training may go on; the counters are to be read once more."""
    OVER = auto()


_moves = threading.Condition()
"""Guards the phases of all windows and who is at rest."""
_resting: Counter[int] = Counter()
"""Number of calls of this package that each thread is inside of."""
_windows: weakref.WeakSet[Window] = weakref.WeakSet()


class Window:
    """The time from a snapshot's call to the next optimizer step, which waits for the copy.

    However a capture ends, it ends the wait, and everything that a capture waits for has a deadline.
    A forked child waits for nothing: the copy is of its parent's memory.
    """

    def __init__(self, step: int) -> None:
        """Open the window, on the training thread."""
        self.step = step
        self.thread = threading.get_ident()
        """The thread that has opened it."""
        self._pid = os.getpid()
        self._phase = Phase.WAITING
        self._carried: CarriedCopies | None = None
        self._changed: Callable[[], list[str]] | None = None
        """Reads the counters, once the copy is made: names of what was written meanwhile."""
        self._names: list[str] = []
        """Names that it gave when it was read last."""
        self.at_end: Callable[[], None] | None = None
        """Called, once, by the thread that comes to the end of the window, before it writes."""
        with _moves:
            _windows.add(self)

    # -- training thread --------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until the copy is complete or given up, or its rest is carried over.

        An optimizer's step on another thread (autograd has some of its own) is the training thread's, too.
        """
        if not self._is_passed():
            self._wait()
        at_end, self.at_end = self.at_end, None
        if at_end is not None:
            at_end()

    def _wait(self) -> None:
        with span("window.wait", step=self.step) as fields, resting(self.thread):
            self._until(lambda: self._phase is not Phase.WAITING)
            carried = self._carried
            fields["carried"] = carried is not None and carried.carry()
            if not fields["carried"]:
                self._until(self._is_passed)

    def _is_passed(self) -> bool:
        if self.is_over or os.getpid() != self._pid:
            return True
        with _moves:
            self.look_again()
            return self.is_over

    def look_again(self) -> None:
        """Nothing is being written now: if the copy is made, the counters tell whether it is good."""
        if self._phase is Phase.COPIED:
            self._look()
            self._go(Phase.OVER)

    def _look(self) -> None:
        self._names = self._changed() if self._changed is not None else []

    # -- saving thread ----------------------------------------------------------------------------

    def begin(self, carried: CarriedCopies | None) -> None:
        """Say that the copy begins; `carried` is what can be carried over of it."""
        self._carried = carried
        self._go(Phase.COPYING)

    def settle(self, changed: Callable[[], list[str]], pause_s: float) -> list[str]:
        """Say that the copy is made; return the names of what was written meanwhile.

        Blocks until the training thread comes to rest, for `pause_s` seconds at most; the training may go
        on meanwhile.  `changed` reads the counters.  There is no wait in a window that is over already, as
        where the copy is of a replica.
        """
        with _moves:
            self._changed = changed
            self._look()
            if self.is_over or not pause_s:
                self._go(Phase.OVER)
                return self._names
            self._go(Phase.COPIED)
            _moves.wait_for(lambda: self.is_over or self._is_at_rest, pause_s)
            self.look_again()
            return self._names

    def done(self) -> None:
        """Say that the copy is complete, or will not be."""
        self._go(Phase.OVER)

    # -- both -------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """True if the training may go on, whatever becomes of the save."""
        return self._phase is Phase.OVER

    @property
    def _is_at_rest(self) -> bool:
        return _resting[self.thread] > 0

    def _go(self, phase: Phase) -> None:
        with _moves:
            if phase is Phase.OVER:
                self._changed = None
            if self._phase is not Phase.OVER:
                self._phase = phase
            _moves.notify_all()

    @staticmethod
    def _until(reached: Callable[[], bool]) -> None:
        with _moves:
            _moves.wait_for(reached)


@contextmanager
def resting(thread: int | None = None) -> Iterator[None]:
    """While open, the calling thread, or `thread`, writes to no tensor: whoever has copied looks again, and
    is done sooner."""
    thread = threading.get_ident() if thread is None else thread
    _come_to_rest(thread)
    try:
        yield
    finally:
        with _moves:
            _resting[thread] -= 1


def _come_to_rest(thread: int) -> None:
    with _moves:
        for window in [one for one in _windows if one.thread == thread]:
            window.look_again()
        _resting[thread] += 1
        _moves.notify_all()


def rest() -> None:
    """On the training thread: nothing is being written.  Returns at once."""
    with resting():
        pass


def wait_for_copies() -> None:
    """Wait for copies, on the training thread, before it writes to tensors outside an optimizer's
    step."""
    with _moves:
        windows = list(_windows)
    for window in windows:
        window.wait()


class Gate:
    """Waits for the open window before every torch optimizer's step.

    It is subscribed for as long as there are saves: torch cannot bear a hook that removes itself.
    """

    def __init__(self) -> None:
        self.window: Window | None = None
        self.is_bypassed = True
        """True if a step may be made without a call of the hook: in a graph of a device."""
        self.num_held: int | None = 0
        """Number of saves in a row that were held for that; None once the user was told."""
        self._looked_at = -1
        self._was_called = self._is_in_graph = False
        self._hooks = before_every_step(self._before_step), after_every_step(note_streams)

    def look(self, step: int) -> None:
        """See, on the training thread, whether the hook was called since it came to the step before."""
        was_called, self._was_called = self._was_called, False
        if was_called or step != self._looked_at:
            self.is_bypassed = self._is_in_graph or not was_called
        if self.num_held and not self.is_bypassed:
            self.num_held = 0
        self._looked_at = step
        join_streams()

    def _before_step(self) -> None:
        self._was_called = True  # a count would have torch.compile compile each step anew
        if not torch.compiler.is_compiling():
            self._is_in_graph |= is_capturing()
        if self.window is not None:
            self.window.wait()

    def close(self) -> None:
        """Let every later step pass; on the training thread."""
        self.window = None
        for hook in self._hooks:
            hook.remove()


def _rest_for_ever() -> None:
    """Let the main thread rest for good, when Python ends."""
    _come_to_rest(threading.get_ident())


def _forget() -> None:
    """A forked child has none of its parent's copies."""
    global _moves
    _moves = threading.Condition()
    _resting.clear()
    _windows.clear()


before_exit(_rest_for_ever)
before_capture.append(wait_for_copies)
os.register_at_fork(after_in_child=_forget)
