"""The start of the records of a run, and what becomes of them as its steps change."""

from __future__ import annotations

from holdfast.core.checkpoint.lineage import Owns
from holdfast.core.checkpoint.names import RootKeys, Saved
from holdfast.core.checkpoint.peers import raise_on_all
from holdfast.live.saving.steps import Follower
from holdfast.live.tier import LogOfRun, RunParts
from holdfast.tiers.records.log import mark_log
from holdfast.tiers.records.options import Delta
from holdfast.tiers.records.tier import DeltaTier


class LogKeeping(Follower):
    """Deletes the records that no step of a store needs."""

    below = ("log/",)

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: as of `mark_log`."""
        self._max_bytes = max_bytes

    def mark(self, keys: RootKeys, saved: list[Saved], owns: Owns) -> None:
        mark_log(keys, saved, owns, max_bytes=self._max_bytes)


def start(run: RunParts, options: Delta) -> DeltaTier:
    """Return the tier of records of a run.  Collective."""
    with raise_on_all(run.group, 0):
        tier = DeltaTier(
            run.state,
            run.group,
            run.durable.steps,
            options,
            run.notices,
            run=run.claim.run,
            mesh=run.mesh,
            on_resize=run.on_resize,
            is_tuned=run.is_tuned,
        )
    follower = LogKeeping(options.bound)
    run.durable.steps.followers.append(follower)
    for other in run:
        other.copy_records(LogOfRun(follower, tier.way.flush, options.upload_every_s))
    return tier
