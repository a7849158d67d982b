"""Frequencies: after how many steps each tier acts again, fixed (`Every`) or tuned (`Auto`)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from holdfast.base.arguments import MAX_STEP, count_of, unfit
from holdfast.base.entry import options, public
from holdfast.base.errors import UsageError

if TYPE_CHECKING:
    from holdfast.policy.tuning import Auto


@options
@dataclass(frozen=True, slots=True)
class Every:
    """Number of steps after which each tier acts again.  None: only when asked."""

    durable: int | None = None
    memory: int | None = None
    delta: int | None = None

    @public
    def __post_init__(self) -> None:
        for tier in ("durable", "memory", "delta"):
            n = getattr(self, tier)
            if n is not None:
                n = count_of(
                    n,
                    "Every",
                    tier,
                    most=MAX_STEP,
                    hint="leave it out, or say None, and it acts only when asked",
                )
                object.__setattr__(self, tier, n)
        if self.delta not in (None, 1):
            raise UsageError(
                f"Every(delta={self.delta!r}): records are of every step, so 1 or None"
            )

    @classmethod
    def by_hand(cls, *, memory: int | None = None, delta: int | None = None) -> Every:
        """The frequencies of a run that saves durably when its script, or its trainer, calls `save`: `step`
        makes no durable save, and does not warn of that."""
        return cls(MAX_STEP, memory, delta)


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
