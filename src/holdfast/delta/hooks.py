"""Hooks on the optimizers: who makes a step, within which other, and whether it came to its end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from holdfast.delta.recording import Steps
from holdfast.errors import UsageError
from holdfast.state.wrapped import is_followed_by_ours


@dataclass(frozen=True)
class Call:
    """The step of an optimizer, as it begins."""

    one: Steps
    given: list[Any]
    """Its arguments."""
    around: Steps | None
    """The optimizer in whose step it begins, if any."""
    again: bool
    """True if this optimizer's step before did not come to its end."""


class Hooks:
    """Hooks before and after the step of each optimizer; before it the last of all, so that no other
    changes gradients behind it."""

    def __init__(
        self,
        steps: list[Steps],
        before: Callable[[Call], None],
        after: Callable[[Steps], None],
    ) -> None:
        """Neither `before` nor `after` is called in a forked child: records are its parent's."""
        self._told = before
        self._after = after
        self._running: dict[FrameType, Steps] = {}
        """Steps under way, by the calls that make them."""
        self._handles: list[Any] = []
        self._last: dict[str, tuple[Any, int]] = {}
        self._pid = os.getpid()
        for one in steps:
            first = one.optimizer.register_step_pre_hook(self._begins(one))
            second = one.optimizer.register_step_post_hook(self._ends)
            self._last[one.key] = one.optimizer, first.id
            self._handles += [first, second]

    def _begins(self, one: Steps) -> Callable[..., None]:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if os.getpid() != self._pid:
                return
            call = sys._getframe(1)
            every = (*args[1:], *kwargs.values())  # torch hands over the optimizer, too
            given = [value for value in every if value is not None]
            around = self._around(call)
            again = around is None and self.has_failed(one.key)
            self._running[call] = one  # from here on: an interrupt in this hook is one, too
            self._told(Call(one, given, around, again))

        return hook

    def _around(self, call: FrameType) -> Steps | None:
        """The optimizer in whose step a call is made.  A step that has failed is never one."""
        frame: FrameType | None = call if self._running else None
        while frame is not None and frame not in self._running:
            frame = frame.f_back
        return None if frame is None else self._running[frame]

    def has_failed(self, key: str | None = None) -> bool:
        """True if a step of an optimizer (None: of any) did not come to its end, which is forgotten
        then; to be asked when none of its steps is under way."""
        failed = [call for call, one in self._running.items() if key in (None, one.key)]
        for call in failed:
            del self._running[call]
        return bool(failed)

    def _ends(self, *_: Any) -> None:
        if os.getpid() != self._pid:
            return
        one = self._running.pop(sys._getframe(1), None)
        if one is not None:
            self._after(one)

    def move_last(self) -> None:
        self._running.clear()
        for optimizer, number in self._last.values():
            optimizer._optimizer_step_pre_hooks.move_to_end(number)

    def are_last(self, key: str) -> bool:
        """True if its hook is last, but for those of other checkpointers, which change nothing."""
        return is_followed_by_ours(*self._last[key])

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def refused(key: str, given: list[Any]) -> UsageError:
    """The error for arguments of `step()`, which a replay would have to hand over, too."""
    if callable(given[0]):
        return UsageError(
            "delta= cannot record an optimizer that is given a closure",
            hint="call step() without one; LBFGS cannot be recorded",
        )
    return UsageError(
        f"delta= cannot record {key!r}, whose step() is given {', '.join(map(repr, given))}",
        hint="have it in the parameter groups, or use memory= and durable saves alone",
    )
