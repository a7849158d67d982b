"""The observer of optimizers: calls subscribers before and after each step, in a fixed order.

Weights and optimizer states change only inside `optimizer.step()`; gradients are final when it begins, and
until it ends the optimizer alone reads them.  Three parts of this package rely on that.  All of them use
torch's hooks, and this module alone knows those:

    optimizer.step()
      |  hooks on all optimizers        the WINDOW waits until a snapshot's copy is made
      |  hooks of others                clip, scale or mask gradients
      |  hooks of ours      TWINS       copy the gradients, which are final now
      |                     RECORDS     copy them, too
      |
      |  the step itself                writes weights and states
      |
      |  hooks of ours      TWINS       note the weights and states as the step left them
      |  hooks of others                may write to weights, such as a mask
      |  hooks of ours      RECORDS     note the weights and states as step and hooks left them
      |  hooks of others, registered after those of RECORDS, and hooks on all optimizers

* *Last before the step.*  A hook behind ours could change gradients after their copy.  Torch calls hooks
  in the order in which they were registered, so ours have to be moved.  It iterates over them meanwhile and
  cannot bear that they change in a step: they are moved between two steps (`come_last`).  In a step,
  `is_last` can only find that a hook was registered behind ours; then the copy is given up.
* *After the step* twins are first: what other hooks write is no part of the step that they make again.
  Records stay where they were registered: a replay calls the hooks that were there when the run began,
  and what is written behind them is an edit by the script.
* *Failed steps.*  Torch calls the hooks before and after a step from one frame of its own.  A step has
  ended when the hook after it is called from the frame from which the hook before it was.  If another step
  begins, that frame is among its callers, so the other is made inside it; or it is not, so it has failed.

A forked child calls no subscriber: twins and records are its parent's.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum, auto
from functools import partial
from itertools import takewhile
from types import FrameType
from typing import Any, Generic, TypeVar

import msgspec
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from holdfast.base.errors import need
from holdfast.live.state.graphs import is_capturing

need("torch", Optimizer, "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
(_global_optimizer_pre_hooks,) = need(
    "torch", "torch.optim.optimizer", "_global_optimizer_pre_hooks"
)
(_current_graph_task_id,) = need("torch", "torch._C", "_current_graph_task_id")

Name = TypeVar("Name", bound=Hashable)

NO_BACKWARD = -1
"""torch's number of the backward pass in a thread without one."""


class HookOrder(IntEnum):
    """Subscribers in the order in which they are called before a step, behind all hooks of others."""

    TWINS = auto()
    """Called first of all after the step."""
    RECORDS = auto()
    """Called after the step among the others, in the order of registration."""


class StepCall(msgspec.Struct, Generic[Name], frozen=True):
    """A call of `optimizer.step()`."""

    name: Name
    """Name that the subscriber gave to the optimizer."""
    optimizer: Any
    args: tuple[Any, ...]
    """Positional arguments of `step()`."""
    kwargs: dict[str, Any]
    around: Name | None
    """The optimizer inside whose step this step begins, if any."""
    again: bool
    """True if this optimizer's previous step has failed."""

    @property
    def given(self) -> list[Any]:
        """The arguments that are not None."""
        return [value for value in (*self.args, *self.kwargs.values()) if value is not None]

    @property
    def closure(self) -> Any:
        """The closure that the step is to call; None if there is none."""
        return self.args[0] if self.args else self.kwargs.get("closure")


class _Hook:
    """A hook on the steps of one optimizer."""

    __slots__ = ("_call", "order")

    def __init__(self, order: HookOrder, call: Callable[[FrameType, Any, Any], None]) -> None:
        self.order = order
        self._call = call

    def __call__(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call(sys._getframe(1), args, kwargs)


class Observer(Generic[Name]):
    """Calls a subscriber before and after each step of some optimizers."""

    def __init__(
        self,
        optimizers: Mapping[Name, Any],
        order: HookOrder,
        before: Callable[[StepCall[Name]], None],
        after: Callable[[StepCall[Name]], None],
    ) -> None:
        """Register hooks, between two steps.  `before` is called when a step begins, `after` when it has
        come to its end."""
        self._before, self._after = before, after
        self._running: dict[FrameType, StepCall[Name]] = {}
        """Steps that have begun and not ended, by the frame that calls the hooks."""
        self._pid = os.getpid()
        self._numbers: dict[Name, tuple[Any, int]] = {}
        """Each optimizer, and the number of the hook before its steps."""
        self._handles: list[RemovableHandle] = []
        for name, optimizer in optimizers.items():
            begins = _Hook(order, partial(self._begins, name, optimizer))
            first = optimizer.register_step_pre_hook(begins)
            second = optimizer.register_step_post_hook(_Hook(order, self._ends))
            self._numbers[name] = optimizer, first.id
            self._handles += [first, second]
        self.come_last()

    def _begins(
        self, name: Name, optimizer: Any, frame: FrameType, args: Any, kwargs: dict[str, Any]
    ) -> None:
        if os.getpid() != self._pid or is_capturing():
            return
        around = self._around(frame)
        again = around is None and self.forget_failed(name)
        call = StepCall(name, optimizer, args[1:], kwargs, around, again)  # args[0]: the optimizer
        self._running[frame] = call  # from here on: an interrupt in a subscriber is a failure, too
        self._before(call)

    def _ends(self, frame: FrameType, *_: Any) -> None:
        call = self._running.pop(frame, None) if os.getpid() == self._pid else None
        if call is not None:
            self._after(call)

    def _around(self, caller: FrameType) -> Name | None:
        """The optimizer in whose step a call is made.  A step that has failed is never one."""
        frame: FrameType | None = caller if self._running else None
        while frame is not None and frame not in self._running:
            frame = frame.f_back
        return None if frame is None else self._running[frame].name

    def forget_failed(self, name: Name | None = None) -> bool:
        """Forget steps of an optimizer (None: of any) that have begun and not come to their end; True if
        there were any.  To be called when none of its steps is under way."""
        failed = [frame for frame, call in self._running.items() if name in (None, call.name)]
        for frame in failed:
            del self._running[frame]
        return bool(failed)

    def come_last(self) -> None:
        """Put the hooks where they belong; to be called between two steps."""
        for optimizer, _ in self._numbers.values():
            _arrange(optimizer)

    def is_last(self, name: Name) -> bool:
        """True if no hook of others, which may change gradients, comes behind the one before an
        optimizer's step.  Those of this package, of any checkpointer, change nothing."""
        optimizer, number = self._numbers[name]
        hooks = optimizer._optimizer_step_pre_hooks
        behind = takewhile(lambda other: other != number, reversed(hooks))
        return number not in hooks or all(isinstance(hooks[other], _Hook) for other in behind)

    def close(self) -> None:
        """Remove the hooks, between two steps."""
        for handle in self._handles:
            handle.remove()


def _arrange(optimizer: Any) -> None:
    """Put the hooks of this package where they belong among all hooks of an optimizer."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    for _, number in sorted(_ours(before)):
        before.move_to_end(number)
    firsts = [number for order, number in _ours(after) if order is HookOrder.TWINS]
    for number in reversed(firsts):
        after.move_to_end(number, last=False)


def _ours(hooks: OrderedDict[int, Any]) -> list[tuple[HookOrder, int]]:
    """Order and number of each hook of this package, as they were registered."""
    return [(hook.order, n) for n, hook in hooks.items() if isinstance(hook, _Hook)]


def before_every_step(call: Callable[[], None]) -> RemovableHandle:
    """Have `call` called before each step of any torch optimizer, ahead of the hooks of that optimizer."""
    return register_optimizer_step_pre_hook(lambda *_: call())


def after_every_step(call: Callable[[Any], None]) -> RemovableHandle:
    """Have `call` called with the optimizer after each step of any torch optimizer, but for compiled
    ones."""

    def called(optimizer: Any, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            call(optimizer)

    return register_optimizer_step_post_hook(called)


class StepCounts:
    """Counts the steps of all torch optimizers in this process, by optimizer.

    The hook is called behind each of thousands of steps.  In a step that is compiled it only notes that
    there was one: a count, or which optimizer it was, would have torch.compile compile each step anew.
    """

    def __init__(self, also: Callable[[Any], None]) -> None:
        """`also`: called with the optimizer after each step, too, but for compiled ones."""
        self.found: dict[int, tuple[weakref.ref[Any], int]] = {}
        """Each optimizer and the number of its steps that have ended, by its id."""
        self.has_compiled = False
        """True if a compiled step was made: of which optimizer is not known."""
        self._earlier: dict[int, weakref.ref[Any]] = {}
        self._had_compiled = False
        """Like `has_compiled`, for the time between `forget` and the last `clear`."""
        self._in_backward: dict[int, weakref.ref[Any]] = {}
        """The optimizers that have stepped in a backward pass since `forget`, by id."""
        self._also = also
        self._handle = register_optimizer_step_post_hook(self._ended)

    def _ended(self, optimizer: Any, *_: Any) -> None:
        if torch.compiler.is_compiling():
            self.has_compiled = True
            return
        known = self.found.get(id(optimizer))
        if known is not None and known[0]() is optimizer:
            self.found[id(optimizer)] = known[0], known[1] + 1
        else:
            self.found[id(optimizer)] = weakref.ref(optimizer), 1
        if _current_graph_task_id() != NO_BACKWARD:
            self._in_backward[id(optimizer)] = self.found[id(optimizer)][0]
        self._also(optimizer)

    def by_optimizer(self) -> list[tuple[Any, int]]:
        """Optimizers that still exist, with the numbers of their steps."""
        pairs = [(ref(), number) for ref, number in list(self.found.values())]
        return [(one, number) for one, number in pairs if one is not None]

    def stepped_in_backward(self) -> list[Any]:
        """Optimizers that still exist and have stepped in a backward pass since `forget`."""
        ever = [ref() for ref in list(self._in_backward.values())]
        return [one for one in ever if one is not None]

    def clear(self) -> None:
        """Begin to count anew."""
        refs = {**self._earlier, **{key: ref for key, (ref, _) in self.found.items()}}
        self._earlier = {key: ref for key, ref in refs.items() if ref() is not None}
        self._had_compiled = self._had_compiled or self.has_compiled
        self.found.clear()
        self.has_compiled = False

    def forget(self) -> None:
        """Begin anew, with a state that was restored."""
        self.clear()
        self._earlier, self._had_compiled = {}, False
        self._in_backward = {}

    def since_forget(self) -> tuple[list[Any], bool]:
        """Optimizers that there still are and that have stepped since `forget`; True if a compiled step
        was made since."""
        refs = [*self._earlier.values(), *(ref for ref, _ in list(self.found.values()))]
        ever = [ref() for ref in refs]
        return [one for one in ever if one is not None], self._had_compiled or self.has_compiled

    def close(self) -> None:
        """Remove the hook, between two steps."""
        self._handle.remove()


def calls_hooks(optimizer: Any) -> bool:
    """True if torch calls hooks for an optimizer's steps: not if its __init__ has not called torch's."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def hooks_after(optimizer: Any) -> int:
    """Number of hooks of others that follow an optimizer's step."""
    hooks = optimizer._optimizer_step_post_hooks.values()
    return sum(not isinstance(hook, _Hook) for hook in hooks)


# -- steps with and without hooks -----------------------------------------------------------------


def unhooked(optimizer: Optimizer) -> Any:
    """The function that makes an optimizer's steps, without its hooks."""
    step = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def hooked(make: Callable[[Any], None]) -> Callable[[Any], None]:
    """The function that makes an optimizer's step by `make`, with its hooks around that."""
    return Optimizer.profile_hook_step(make)


@contextmanager
def without_hooks_before(optimizer: Any) -> Iterator[None]:
    """Leave out hooks before the step: recorded gradients are as these had made them already."""
    every = optimizer._optimizer_step_pre_hooks, _global_optimizer_pre_hooks
    kept = [list(hooks.items()) for hooks in every]
    for hooks in every:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(every, kept):
            hooks.update(before)
