"""The choice of the step to restore, a pure one over what there is.

Candidates come newest first; of one step in two tiers the nearer one comes first.  A step that turns
out to be damaged is passed over, aloud, and the next is tried; what the user did wrong (a state that does
not fit) is not passed over, because an older step would not fit either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from holdfast.base.errors import (
    PASSED_OVER,
    HoldfastError,
    NotRecoverable,
    Unavailable,
    UnsupportedVersion,
)

STOPS = (UnsupportedVersion, Unavailable)

Identity = tuple[int, int]
"""Run and step of a state."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A step that may be restored.  `attempt` names a snapshot, or a step that has to be of it."""

    run: int
    step: int
    attempt: str = ""
    tip: Identity | None = None
    """The state that records lead to from it, if there are any."""
    replaced: bool = False
    """True if storage has a later save of this step."""
    tier: str = "durable"
    """Name of the tier that has it."""
    place: str = ""
    """Name of its place in messages; empty for the root."""
    nearness: int = 0
    """Number of its tier, from the farthest to the nearest."""

    @property
    def in_memory(self) -> bool:
        return self.tier == "memory"

    @property
    def base(self) -> Identity:
        """The state that it is of."""
        return self.run, self.step

    @property
    def end(self) -> Identity:
        """The state that it leads to, with all its records."""
        return self.tip or self.base

    def __str__(self) -> str:
        return f"step {self.step}" + f" in {self.place}" * bool(self.place)


def newest_first(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Sort by the run and step they lead to, then their own step, then the one saved later, then the
    nearest tier.

    A run that went back has made what came after that step history.
    """

    def newness(c: Candidate) -> tuple[object, ...]:
        return (c.end, c.step, not c.replaced, c.nearness, c.attempt)

    return sorted(candidates, key=newness, reverse=True)


def newest_good(
    candidates: Sequence[Candidate],
    attempt: Callable[[Candidate], object],
    passed_over: Callable[[Candidate, HoldfastError], None],
) -> Candidate | None:
    """Try each candidate in order until `attempt` succeeds; None if there are no candidates.

    NotRecoverable, with the reason for every candidate, if none can be used.
    """
    reasons: dict[int, str] = {}
    lines = []
    for candidate in candidates:
        try:
            attempt(candidate)
            return candidate
        except PASSED_OVER as error:
            if isinstance(error, STOPS):
                raise
            lines.append(f"  {candidate}: {error}")
            reasons[candidate.step] = "; ".join(
                filter(None, (reasons.get(candidate.step), str(error)))
            )
            passed_over(candidate, error)
    if not lines:
        return None
    text = "\n".join(lines)
    hint = "`holdfast verify` says what is damaged; restore the files from a copy"
    if any(c.in_memory for c in candidates):
        hint += "; `holdfast agent clean` frees what is in memory"
    raise NotRecoverable(
        f"none of {len(lines)} step(s) can be restored:\n{text}", reasons, hint=hint
    )
