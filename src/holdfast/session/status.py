"""The status of a run: how far each of its tiers has come, as `Checkpointer.status` tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.base.sizes import size_text
from holdfast.base.text import ago, listed, one_line
from holdfast.live.saving.progress import TierStatus


@dataclass(frozen=True, slots=True)
class RunStatus:
    """How well a run is protected now, as this rank knows it.  Printed, it is a few lines."""

    root: str
    """The URL of the root."""
    run: int
    """The number of the run."""
    step: int | None
    """The last step that `step` or `save` was called with; None before the first."""
    is_open: bool
    """False once the Checkpointer is closed."""
    tiers: Mapping[str, TierStatus]
    """By name, for each tier that is switched on, from the farthest to the nearest: `upload`, `durable`,
    `memory`, `delta` (records).  Each has `step`, the step that it has kept last, `since` and `age_s`, the
    `seconds` and `bytes` of its last save on this rank, the steps `under_way`, and the last `error`."""

    @property
    def protected(self) -> int | None:
        """The newest step that any tier has: a restart after the end of this process goes on from it.  None
        if there is none."""
        return max((t.step for t in self.tiers.values() if t.step is not None), default=None)

    @property
    def by(self) -> tuple[str, ...]:
        """Names of the tiers that have that step."""
        newest = self.protected
        return tuple(
            name for name, t in self.tiers.items() if newest is not None and t.step == newest
        )

    def __str__(self) -> str:
        width = max(map(len, self.tiers))
        lines = [f"  {name:<{width}}  {_line(tier)}" for name, tier in self.tiers.items()]
        return "\n".join([f"{self.root}, run {self.run}{self._at}: {self._answer}", *lines])

    @property
    def _at(self) -> str:
        at = "" if self.step is None else f", at step {self.step}"
        return at if self.is_open else f"{at}, closed"

    @property
    def _answer(self) -> str:
        if self.protected is None:
            return "nothing is saved yet"
        return f"protected up to step {self.protected} ({', '.join(self.by)})"


def _line(tier: TierStatus) -> str:
    parts = ["no step yet" if tier.step is None else f"step {tier.step}{_since(tier)}"]
    if tier.bytes is not None:
        took = "" if tier.seconds is None else f" in {tier.seconds:.3g} s"
        parts.append(f"last save {size_text(tier.bytes)}{took}")
    if tier.under_way:
        parts.append(f"under way: {listed(tier.under_way)}")
    if tier.error is not None:
        parts.append(f"the last one failed: {one_line(tier.error)}")
    return "; ".join(parts)


def _since(tier: TierStatus) -> str:
    return "" if tier.age_s is None else f", {ago(tier.age_s)}"
