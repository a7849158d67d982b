"""Exactness of a step that was copied from a replica on the host instead of the live state."""

from __future__ import annotations

import msgspec

REPLICA = "replica"
"""The entry of a manifest's `software` that says how exact a step is."""
BIT_EXACT = "bit-exact"


class Exactness(msgspec.Struct, frozen=True, array_like=True):
    """The exactness of a copy from replicas, of one rank or of all."""

    is_exact: bool
    """True if no difference was seen or is to be expected."""
    drift: float
    """The largest difference of an element from the live state that was seen."""
    compared: int
    """The step of the last comparison with the live state."""

    def __str__(self) -> str:
        kind = (
            BIT_EXACT
            if self.is_exact
            else f"numerically equal, within {self.drift:.2g} as far as seen"
        )
        return f"{kind}, compared last at step {self.compared}"
