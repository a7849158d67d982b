"""The snapshots that a restart finds in the memory of the nodes."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec

from holdfast.base.errors import Corrupt, NotFound
from holdfast.base.events import emit
from holdfast.base.wire import decode_json
from holdfast.core.checkpoint.names import Saved
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.format.manifest import FileEntry, Manifest
from holdfast.core.group import Group
from holdfast.core.store import Store
from holdfast.live.restore.candidates import Candidate
from holdfast.live.restore.targets import RestoreOptions
from holdfast.live.restore_into_state import restore
from holdfast.live.state.recognising import State
from holdfast.tiers.memory.node.inventory import Inventory, Key, SnapshotStore, image_of

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
        """Restore a snapshot from the nodes' memory; it is the newest on this node then, too.  Collective.

        An image that is damaged or out of reach counts as lost.  Corrupt or NotFound if what is left does
        not suffice.
        """
        manifest = self.inventory.find(candidate.attempt)
        self._restore(manifest, state, options, verify=verify)
        self._tier.take_over(manifest, self.inventory.cards(manifest.attempt))
        return manifest

    def _restore(
        self, manifest: Manifest, state: State, options: RestoreOptions, *, verify: bool
    ) -> None:
        inventory, group, is_renewed = self.inventory, self._tier.saver.group, False
        while True:
            store = SnapshotStore(inventory, self._root)
            try:
                restore(Checkpoint(store, manifest, verify=verify), state, group, options)
                return
            except (Corrupt, NotFound) as error:
                image = image_of(error.key)
                if image is None:
                    raise
                if not is_renewed and isinstance(error, NotFound):
                    # an agent that died meanwhile may have a successor, which holds the same
                    is_renewed = True
                    inventory.renew(*self._tier.agent.ask_all())
                    continue
                if not inventory.lose(_suspects(inventory, image, group)):
                    raise
                emit("memory.lost", key=error.key, error=str(error))
            finally:
                store.tally.tell()

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


def _suspects(inventory: Inventory, image: tuple[str, int], group: Group) -> set[Key]:
    """Return the keys that some rank finds damaged or out of reach, so that all ranks leave out the
    same.  Collective."""
    of_ranks = group.all_gather(msgspec.json.encode(inventory.suspects(*image)))
    return {key for data in of_ranks for key in decode_json(data, list[Key])}
