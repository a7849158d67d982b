"""The snapshots that a restart finds in the memory of the nodes."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from holdfast.core.checkpoint.names import Saved
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.format.manifest import FileEntry, Manifest
from holdfast.core.store import Store
from holdfast.live.restore.candidates import Candidate
from holdfast.live.restore.targets import RestoreOptions
from holdfast.live.state.recognising import State
from holdfast.tiers.memory.loading import load_snapshot
from holdfast.tiers.memory.node.inventory import Inventory, SnapshotStore

if TYPE_CHECKING:
    from holdfast.tiers.memory.tier import MemoryTier

MEMORY = "memory"


class SnapshotShelf:
    """The snapshots of this job that the agents of all nodes hold, also of those that it no longer runs on,
    if they still answer."""

    tier = place = MEMORY

    def __init__(self, tier: MemoryTier) -> None:
        """Ask the agents of all nodes.  Collective."""
        self._tier = tier
        self._root = tier.durable.store
        self.inventory = Inventory(tier.agent.job, *tier.agent.ask_all())
        self.saved: list[Saved] = []
        self.store: Store | None = None
        self.log: Collection[str] | None = None
        self.candidates = [
            Candidate(m.run, m.step, m.attempt, tier=MEMORY, place=MEMORY)
            for m in sorted(self.inventory.manifests, key=lambda m: m.step)
        ]

    def load(
        self, candidate: Candidate, state: State, options: RestoreOptions, *, verify: bool
    ) -> Manifest:
        """Restore a snapshot, as `load_snapshot` does; it is the newest on this node then, too."""
        tier, inventory = self._tier, self.inventory
        manifest = inventory.find(candidate.attempt)
        load_snapshot(
            inventory,
            manifest,
            self._root,
            tier.saver.group,
            state,
            options,
            lambda stale: stale.renew(*tier.agent.ask_all()),
            verify=verify,
        )
        tier.take_over(manifest, inventory.cards(manifest.attempt))
        return manifest

    def opened(self, candidate: Candidate, *, verify: bool) -> Checkpoint:
        snapshots = SnapshotStore(self.inventory, self._root)
        return Checkpoint(snapshots, self.inventory.find(candidate.attempt))

    def check(self, checkpoint: Checkpoint, file: FileEntry) -> None:
        """HoldfastError unless a file is there: its size is what the manifest says."""
        checkpoint.images.check_size(file)
        checkpoint.store.open(checkpoint.images.key(file)).close()

    def noted(self, candidate: Candidate) -> Checkpoint | None:
        return Checkpoint(self._root, self.inventory.find(candidate.attempt))

    def lost_nodes(self, attempt: str = "") -> tuple[str, int]:
        return self.inventory.lost_nodes(attempt)
