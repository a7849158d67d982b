"""Exactness of a step that was copied from a replica on the host, and not from the live state."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from holdfast.errors import warn_user
from holdfast.events import emit
from holdfast.format.manifest import Manifest

REPLICA = "replica"
"""The entry of a manifest's `software` that says how exact a step is."""
EXACT = "bit-exact"


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
            EXACT if self.is_exact else f"numerically equal, within {self.drift:.2g} as far as seen"
        )
        return f"{kind}, compared last at step {self.compared}"


def of_all(ranks: Iterable[Exactness | None]) -> dict[str, str]:
    """Entry of the worst for a manifest; `None`: a rank that copied the live state.  {} if all
    did."""
    found = [one for one in ranks if one is not None]
    if not found:
        return {}
    worst = Exactness(
        all(one.is_exact for one in found),
        max(one.drift for one in found),
        min(one.compared for one in found),
    )
    return {REPLICA: str(worst)}


def tell_exactness(manifest: Manifest) -> str:
    """Return how exact a step is.  An event if it was made from gradients; a warning if it is not known to
    be bit-exact."""
    exactness = manifest.software.get(REPLICA)
    if exactness is None:
        return EXACT
    emit("restore.from_replica", step=manifest.step, exactness=exactness)
    if not exactness.startswith(EXACT):
        warn_user(
            f"step {manifest.step} was made from gradients on the host, not copied from the device: "
            f"{exactness}"
        )
    return exactness
