"""Exactness of a step that was copied from a replica on the host, and not from the live state."""

from __future__ import annotations

import msgspec

REPLICA = "replica"
"""The entry of a manifest's `software` that says how exact a step is."""
BIT_EXACT = "bit-exact"


class Exactness(msgspec.Struct, frozen=True, array_like=True):
    """The exactness of what one rank has copied from a replica, or all of them."""

    is_exact: bool
    """True if bit-exact as far as was seen, and there is no reason to think otherwise."""
    drift: float
    """The largest difference from the live state that was seen, on any element."""
    compared: int
    """The step at which the replica was compared with the live state last."""

    def __str__(self) -> str:
        kind = (
            BIT_EXACT
            if self.is_exact
            else f"numerically equal, within {self.drift:.2g} as far as seen"
        )
        return f"{kind}, compared last at step {self.compared}"
