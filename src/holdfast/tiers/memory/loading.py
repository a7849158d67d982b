"""Reading a snapshot out of the nodes' memory into the live state, on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.base.errors import Corrupt, NotFound
from holdfast.base.events import emit
from holdfast.base.wire import decode_json
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.format.manifest import Manifest
from holdfast.core.group import Group
from holdfast.core.store import Store
from holdfast.live.restore.targets import RestoreOptions
from holdfast.live.state.recognising import State
from holdfast.live.transaction import restore
from holdfast.tiers.memory.node.inventory import Inventory, Key, SnapshotStore, image_of


def load_snapshot(
    inventory: Inventory,
    manifest: Manifest,
    behind: Store,
    group: Group,
    state: State,
    options: RestoreOptions,
    again: Callable[[Inventory], None],
    *,
    verify: bool,
) -> None:
    """Restore a snapshot from the nodes' memory; an image that is damaged or out of reach counts as lost.

    `again` renews an inventory by asking all agents: one that died meanwhile may have a successor, which
    holds the same.  Collective.  Corrupt or NotFound if what is left does not suffice.
    """
    asked = False
    while True:
        store = SnapshotStore(inventory, behind)
        try:
            restore(Checkpoint(store, manifest, verify=verify), state, group, options)
            return
        except (Corrupt, NotFound) as error:
            image = image_of(error.key)
            if image is None:
                raise
            if not asked and isinstance(error, NotFound):
                asked = True
                again(inventory)
                continue
            if not inventory.lose(_suspects(inventory, image, group)):
                raise
            emit("memory.lost", key=error.key, error=str(error))
        finally:
            store.tally.tell()


def _suspects(inventory: Inventory, image: tuple[str, int], group: Group) -> set[Key]:
    """Return the keys that some rank finds damaged or out of reach, so that all ranks leave out the
    same.  Collective."""
    of_ranks = group.all_gather(msgspec.json.encode(inventory.suspects(*image)))
    return {key for data in of_ranks for key in decode_json(data, list[Key])}
