"""Frequencies: after how many steps each tier acts again."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.base.arguments import MAX_STEP, count_of
from holdfast.base.entry import options, public
from holdfast.base.errors import UsageError


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
