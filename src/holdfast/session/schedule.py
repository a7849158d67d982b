"""The frequencies that a user asks for: fixed (`Every`) or tuned (`Auto`)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

from holdfast.base.arguments import MAX_STEP, count_of, unfit
from holdfast.base.errors import UsageError
from holdfast.live.every import Every

if TYPE_CHECKING:
    from holdfast.policy.tuning import Auto


def every_of(every: Any, *, memory: bool, delta: bool) -> Every | Auto | None:
    """Return the frequencies; a plain number is the steps between durable saves.  UsageError for a
    frequency of a tier that is not switched on."""
    if every is None:
        return None
    if (auto := _auto(every)) is not None:
        return auto
    if isinstance(every, Every):
        return _fixed(every, memory=memory, delta=delta)
    if isinstance(every, (str, bytes)) or not hasattr(every, "__index__"):
        what = "a number of steps, holdfast.Every(...) or holdfast.Auto(...)"
        raise unfit("Checkpointer", "every", every, what)
    return Every(durable=count_of(every, "Checkpointer", "every", most=MAX_STEP))


def _fixed(every: Every, *, memory: bool, delta: bool) -> Every:
    if every.memory is not None and not memory:
        raise UsageError("Every(memory=...) needs Checkpointer(memory=holdfast.Memory())")
    if every.delta is not None and not delta:
        raise UsageError("Every(delta=1) needs Checkpointer(delta=holdfast.Delta())")
    return every


def _auto(every: object) -> Auto | None:
    """Return `every` if it is an `Auto`, else None.  Its module is imported only if the user has made
    one."""
    tuning = sys.modules.get("holdfast.policy.tuning")
    return cast("Auto", every) if tuning is not None and isinstance(every, tuning.Auto) else None
