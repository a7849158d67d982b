"""The root as a tier: its steps, and durable saves, which a nearer tier may carry out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.core.checkpoint.claiming import Claim
from holdfast.live.every import Every
from holdfast.live.saving import Save
from holdfast.live.saving.durable import Durable
from holdfast.live.saving.progress import TierProgress
from holdfast.live.tier import Asked, Collect, Tier

if TYPE_CHECKING:
    from holdfast.live.shelves import Shelf

ROOT = "durable"


class RootTier(Tier):
    """The steps of the root.  The session decides when a durable save is due."""

    name = ROOT
    carries = True

    def __init__(self, durable: Durable) -> None:
        self.news = durable.news
        self._durable = durable
        self.progress: TierProgress = TierProgress()

    def prepare(self, collect: Collect, every: Every) -> Save | None:
        return None if every.durable is None else self._durable.prepare(collect)

    def carry(self, collect: Collect, asked: Asked) -> Save:
        return self._durable.begin(
            collect,
            asked.step,
            must=asked.must,
            yields=asked.yields,
            attached=asked.attached,
        )

    def saving(self, save: Save) -> None:
        self.progress.watch(save)

    def shelf(self) -> Shelf:
        from holdfast.live.shelves import StoredShelf

        durable = self._durable
        known = durable.steps.known
        return StoredShelf(
            durable.store, durable.group, tier=ROOT, is_root=True, known=known, records=True
        )

    def settle(self, limit_s: float) -> None:
        self._durable.settle(limit_s)

    def adopt(self, claim: Claim, base: int | None) -> None:
        self._durable.adopt(claim)

    def close(self, limit_s: float, *, finished: bool, is_asked: bool) -> None:
        self._durable.close(limit_s)
