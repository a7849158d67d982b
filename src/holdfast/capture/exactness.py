"""How exact a step is that was copied from a replica on the host, and not from the live state."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import msgspec

from holdfast.errors import HoldfastWarning
from holdfast.events import emit
from holdfast.format.manifest import Manifest

REPLICA = "replica"
"""The entry of a manifest's `software` that says it."""
EXACT = "bit-exact"


class Exactness(msgspec.Struct, frozen=True, array_like=True):
    """Of what one rank has copied, or all of them."""

    is_exact: bool
    """As far as was seen, and there is no reason to think otherwise."""
    drift: float
    """The largest difference from the live state that was seen, on any element."""
    compared: int
    """The step at which it was compared with the live state last."""

    def __str__(self) -> str:
        kind = (
            EXACT if self.is_exact else f"numerically equal, within {self.drift:.2g} as far as seen"
        )
        return f"{kind}, compared last at step {self.compared}"


def of_all(ranks: Iterable[Exactness | None]) -> dict[str, str]:
    """What a manifest says; `None` of ranks that copied the live state.  Nothing if all did."""
    found = [one for one in ranks if one is not None]
    if not found:
        return {}
    worst = Exactness(
        all(one.is_exact for one in found),
        max(one.drift for one in found),
        min(one.compared for one in found),
    )
    return {REPLICA: str(worst)}


def tell_exactness(manifest: Manifest) -> None:
    """An event if the step was made from gradients; a warning if it is not known to be bit-exact."""
    exactness = manifest.software.get(REPLICA)
    if exactness is None:
        return
    emit("restore.from_replica", step=manifest.step, exactness=exactness)
    if not exactness.startswith(EXACT):
        warnings.warn(
            f"step {manifest.step} was made from gradients on the host, not copied from the device: "
            f"{exactness}",
            HoldfastWarning,
            stacklevel=5,
        )
