"""The twins of a process: the order in which they make their steps, and how far they have come.

A twin is a copy of an optimizer and its parameters in host memory, which makes each step again from a copy
of its gradients.  A snapshot is copied from the twins, so the training is not held up by it.  The training
thread puts gradients and *marks*, one for each snapshot, into a queue.  A thread takes them out: it makes
the steps, and stops at a mark until that snapshot has what it needs:

    training    step 1    step 2    mark A    step 3    step 4    mark B
                  |         |         |         |         |
    queue         g1        g2        A         g3        g4      ...
                            |
    twins             have made g1, make g2; stop at A until the image of snapshot A is filled

The training does not wait for this thread: twins that get too far behind are dropped, and learn anew.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.base.events import emit
from holdfast.base.threads import step_back
from holdfast.live.state.observer import HookOrder, Observer, StepCall
from holdfast.tiers.memory.twin import Gradient, ParamPart, Twin

FAILED = "a step of the optimizer did not end"


@dataclass
class Twins:
    """The twins of a process, and how far they have come.  Made current by `learn`."""

    current: bool = False
    """True if they equalled the training's optimizers at some mark, and all steps since are made or
    queued."""
    all: list[Twin] = field(default_factory=list)
    closed: bool = False
    low_priority: bool = False
    check: Callable[[], str] = lambda: ""
    """Called on the training thread before a step or mark: returns why they cannot follow; empty if
    they can."""
    after_step: Callable[[], None] = lambda: None
    """Called on the training thread after each step."""
    _queue: deque[Gradient | int] = field(default_factory=deque)
    _learning: int | None = None
    """The mark that the twins learn from: gradients are queued until its states are known."""
    _needed: set[int] = field(default_factory=set)
    """The marks whose snapshots may still need the twins."""
    _stopped_at: int = 0
    """The mark at which the twins wait; 0 if they do not."""
    _applying: bool = False
    _observed: list[Twin] = field(default_factory=list)
    """The twins whose optimizers are observed."""
    _observer: Observer[int] = field(init=False)
    """Reports the steps of these optimizers, each named by the number of its twin: a subscription must
    not keep the twin itself alive."""
    _change: threading.Condition = field(
        default_factory=lambda: threading.Condition(threading.RLock())
    )
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._observer = self._observe()

    # -- training thread --------------------------------------------------------------------------

    def mark(self, number: int, learning: Callable[[], None] = lambda: None) -> None:
        """Mark the point in the training at which the snapshot of that number is taken.

        `learning` is called if they are not current and could learn from that snapshot.
        """
        with self._change:
            failed = FAILED if self._observer.forget_failed() else ""
            if self._observed is not self.all:
                self._observer.close()
                self._observed, self._observer = self.all, self._observe()
            self._observer.come_last()
            if not self.all or self.closed:
                return
            why = failed or (self.check() if self.current else "")
            if why:
                self._forget(why)
            if not self.current and self._learning is None and not self._applying:
                try:
                    for twin in self.all:
                        if twin.is_regrouped():
                            twin.regroup()
                except Exception as error:  # such as a parameter in two groups, which torch allows
                    self.end(f"{type(error).__name__}: {error}")
                    return
                learning()
                self._learning = number
            self._queue.append(number)
            self._needed.add(number)
            self._change.notify_all()

    def _observe(self) -> Observer[int]:
        """Observe the optimizers of all twins, and no others."""
        optimizers = {number: twin.outer for number, twin in enumerate(self.all)}
        return Observer(optimizers, HookOrder.TWINS, self._before, self._after)

    def _before(self, call: StepCall[int]) -> None:
        with self._change:
            if not (self.current or self._learning) or self.closed:
                return
            twin = self.all[call.name]
            gradient = None
            why = self._misfit(call, twin)
            if not why:
                gradient = twin.take()
            if gradient is None:
                self._forget(why or "too many steps wait")
                return
            self._queue.append(gradient)
            self._change.notify_all()

    def _misfit(self, call: StepCall[int], twin: Twin) -> str:
        """Return why a twin cannot make the step that begins; empty if it can."""
        if getattr(twin.outer, "grad_scale", None) is not None:
            return "the optimizer itself unscales gradients"
        if call.closure is not None:
            return "the optimizer is given a closure"
        if not self._observer.is_last(call.name):
            return "a hook was registered that may change gradients after their copy"
        if call.again or call.around is not None:  # a gradient is queued whose step was not made
            return FAILED
        return self.check() or twin.misfit()

    def _after(self, _: StepCall[int]) -> None:
        with self._change:
            self.after_step()

    def close(self, limit_s: float) -> None:
        """End the twins for good, with their hooks and their thread."""
        self.end()
        self._observer.close()
        if self._thread is not None:
            self._thread.join(limit_s)

    # -- capture and memory threads ---------------------------------------------------------------

    def make(
        self,
        wanted: Sequence[tuple[Any, Sequence[ParamPart]]],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Replace the twins: one for each optimizer, with parts of its parameters.

        `then` is called to change, at the same moment, what depends on them.
        """
        made = [Twin(optimizer, parts) for optimizer, parts in wanted]
        with self._change:
            self.restart()
            self.all = made
            then()
            if self.all and self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="holdfast-twins", daemon=True
                )
                self._thread.start()

    def at(self, number: int, limit_s: float) -> bool:
        """Wait until the twins have come to the mark of that number; False if they will not, or not in
        time."""
        with self._change:
            self._change.wait_for(
                lambda: (
                    self._stopped_at == number or not self.current or number not in self._needed
                ),
                timeout=limit_s,
            )
            return self.current and self._stopped_at == number

    def go_on(self, number: int) -> None:
        """Let the twins go on: the snapshot of that number no longer needs them."""
        with self._change:
            self._needed.discard(number)
            if self._learning == number:
                self._forget("")
            self._change.notify_all()

    def learn(self, number: int, states: Callable[[], list[list[dict[str, torch.Tensor]]]]) -> bool:
        """Give the twins the training's states at that mark, by twin and part, and make them current;
        False if they do not learn from that mark."""
        with self._change:
            if self._learning != number:
                return False
            for twin, found in zip(self.all, states()):
                twin.put(found)
            while self._queue and self._queue[0] != number:
                self._skip()
            self._learning, self.current = None, True
            emit("twins.learned", parts=sum(len(twin.parts) for twin in self.all))
            self._change.notify_all()
            return True

    # -- any thread -------------------------------------------------------------------------------

    def forget(self, why: str) -> None:
        """Let the twins learn anew, because of `why`."""
        with self._change:
            self._forget(why)

    def restart(self) -> None:
        """Drop the twins, as the state is another now; there are none until `make`."""
        with self._change:
            self._forget("")
            self.all = []

    def end(self, why: str = "") -> None:
        """End the twins for good."""
        if why:
            emit("twins.ended", why=why)
        self.restart()
        with self._change:
            self.closed = True
            self._change.notify_all()

    def _forget(self, why: str) -> None:
        if self.current and why:
            emit("twins.lost", why=why)
        self.current, self._learning = False, None
        while self._queue:
            self._skip()
        self._change.notify_all()

    def _skip(self) -> None:
        item = self._queue.popleft()
        if isinstance(item, Gradient):
            item.twin.give_back(item)

    # -- the twins' own thread --------------------------------------------------------------------

    def _work(self) -> None:
        if self.low_priority:
            step_back(19)
        while True:
            with self._change:
                self._change.wait_for(lambda: self.closed or (self.current and bool(self._queue)))
                if self.closed:
                    return
                item = self._queue.popleft()
                if isinstance(item, int):
                    self._stop_at(item)
                    continue
                self._applying = True
            self._apply(item)

    def _stop_at(self, number: int) -> None:
        self._stopped_at = number
        self._change.notify_all()
        self._change.wait_for(lambda: self.closed or not self.current or number not in self._needed)
        self._stopped_at = 0

    def _apply(self, gradient: Gradient) -> None:
        try:
            gradient.twin.apply(gradient)
        except Exception as error:
            self.end(f"{type(error).__name__}: {error}")
        with self._change:
            self._applying = False
            gradient.twin.give_back(gradient)
