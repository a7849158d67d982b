"""The twins of a process: the order in which they make their steps, and how far they have come.

The training thread puts gradients and *marks*, one for each snapshot, into a queue, and a thread takes them
out: it makes the steps, and stops at a mark until that snapshot has what it needs.  The training does not
wait for it: what gets too far behind is forgotten, and learned anew.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.events import emit
from holdfast.memory.twin import Gradient, Part, Twin
from holdfast.state.wrapped import is_followed_by_ours, is_ours


def _ours_last(hooks: OrderedDict[int, Any]) -> None:
    """Move holdfast's hooks behind everybody else's: this module's first, then the others, each
    kind in its order."""
    ours = [(n, hook.__module__ != __name__) for n, hook in hooks.items() if is_ours(hook)]
    for number, _ in sorted(ours, key=lambda one: one[1]):  # records want to be the very last
        hooks.move_to_end(number)


@dataclass
class Twins:
    """The twins of a process, and how far they have come.  Made current by `learn`."""

    current: bool = False
    """True if they were as the training's optimizers at some mark, and all steps since are made or
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
    """The mark from which on gradients are kept, until the states as they were there are known."""
    _needed: set[int] = field(default_factory=set)
    """The marks at which a snapshot may still want them."""
    _stopped_at: int = 0
    _applying: bool = False
    _hooked: list[Twin] = field(default_factory=list)
    """The twins whose optimizers have the hooks."""
    _hooks: list[tuple[Any, Any]] = field(default_factory=list)
    """Optimizers, and handles to their hooks."""
    _stepping: Any = None
    """The optimizer whose step has begun and not ended."""
    _pid: int = field(default_factory=os.getpid)
    """Process that the twins belong to: a forked child that trains has neither this thread nor a
    say."""
    _change: threading.Condition = field(
        default_factory=lambda: threading.Condition(threading.RLock())
    )
    _thread: threading.Thread | None = None

    # -- training thread --------------------------------------------------------------------------

    def mark(self, number: int, learning: Callable[[], None] = lambda: None) -> None:
        """Mark the point in the training at which the snapshot of that number is taken.

        `learning` is called if they are not current and could learn from that snapshot.
        """
        with self._change:
            if self._hooked is not self.all or not self._are_last():
                self._hook()
            if not self.all or self.closed:
                return
            why = self._unfinished() or (self.check() if self.current else "")
            if why:
                self._forget(why)
            if not self.current and self._learning is None and not self._applying:
                try:
                    for twin in self.all:
                        if twin.is_regrouped():
                            twin.regroup()
                except Exception as error:  # such as a parameter in two groups, which torch bears
                    self.end(f"{type(error).__name__}: {error}")
                    return
                learning()
                self._learning = number
            self._queue.append(number)
            self._needed.add(number)
            self._change.notify_all()

    def _hook(self) -> None:
        """Put hooks on the optimizers of all twins, and no others; torch cannot bear that hooks
        change in a step."""
        self._unhook()
        for number, twin in enumerate(self.all):
            before = twin.outer.register_step_pre_hook(self._before(number))
            after = twin.outer.register_step_post_hook(self._after)
            self._hooks += [(twin.outer, before), (twin.outer, after)]
            _ours_last(twin.outer._optimizer_step_pre_hooks)
            # what other hooks write is not the step's
            twin.outer._optimizer_step_post_hooks.move_to_end(after.id, last=False)
        self._hooked = self.all

    def _unhook(self) -> None:
        for _, hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._hooked = []

    def _are_last(self) -> bool:
        """True if nothing changes gradients behind the hooks."""
        return all(is_followed_by_ours(optimizer, hook.id) for optimizer, hook in self._hooks)

    def _unfinished(self) -> str:
        """Return why they are ahead of the training: a step was given to them that it did not make;
        else empty."""
        begun, self._stepping = self._stepping, None
        return "" if begun is None else "a step of the optimizer did not end"

    def _before(self, number: int) -> Callable[..., None]:
        """Return the hook of the twin of that number; it must not keep the twin itself."""

        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if os.getpid() != self._pid:
                return
            with self._change:
                if not (self.current or self._learning) or self.closed:
                    return
                twin = self.all[number]
                why = self._unfinished() or self.check()
                closure = (args[1:] or (kwargs.get("closure"),))[0]
                if not self._are_last():
                    why = "a hook was registered that may change gradients after their copy"
                if closure is not None:
                    why = "the optimizer is given a closure"
                if getattr(twin.outer, "grad_scale", None) is not None:
                    why = "the optimizer itself unscales gradients"
                why = why or twin.misfit()
                gradient = twin.take() if not why else None
                if gradient is None:
                    self._forget(why or "too many steps wait")
                    return
                self._queue.append(gradient)
                self._stepping = twin.outer
                self._change.notify_all()

        return hook

    def _after(self, *_: Any) -> None:
        if os.getpid() != self._pid:
            return
        with self._change:
            self._stepping = None
            self.after_step()

    def close(self, limit_s: float) -> None:
        """End the twins for good, and what served them."""
        self.end()
        self._unhook()
        if self._thread is not None:
            self._thread.join(limit_s)

    # -- capture and memory threads ---------------------------------------------------------------

    def make(
        self, wanted: Sequence[tuple[Any, Sequence[Part]]], then: Callable[[], None] = lambda: None
    ) -> None:
        """Make other twins than before: for each optimizer, parts of its parameters.

        `then`: is called to change what has to change with them.
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
        """Wait until they are as the snapshot of that number is; False if they will not be."""
        with self._change:
            self._change.wait_for(
                lambda: (
                    self._stopped_at == number or not self.current or number not in self._needed
                ),
                timeout=limit_s,
            )
            return self.current and self._stopped_at == number

    def go_on(self, number: int) -> None:
        """Let the twins go on: the snapshot of that number needs them no more."""
        with self._change:
            self._needed.discard(number)
            if self._learning == number:
                self._forget("")
            self._change.notify_all()

    def learn(self, number: int, states: Callable[[], list[list[dict[str, torch.Tensor]]]]) -> bool:
        """Give the twins the states that they had at that mark, by twin and part, and make them
        current; False if nobody waits for that."""
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
        """Let the twins learn anew: they are not what they should be."""
        with self._change:
            self._forget(why)

    def restart(self) -> None:
        """Drop the twins, for the state is another now: there are none, until some are made."""
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
            with suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
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
