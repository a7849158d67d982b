"""Disk space reserved for one full save: recording stops before it uses that space, and unneeded steps are
deleted for it.

Without the reserve a full disk would stay full: old steps and records are deleted only after a newer full
save is complete, and that save would find no space.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from holdfast.base.errors import NotFound
from holdfast.core.store import LocalStore, Store

_SPARE_BYTES = 64 << 10
"""Bytes added to the size of the files: for folders, the manifest, and the last block of each file."""


def room_for(save_bytes: int) -> int:
    """Return the free bytes to reserve for a full save of `save_bytes`; 0 if its size is not known."""
    return save_bytes + save_bytes // 16 + _SPARE_BYTES if save_bytes else 0


def missing_bytes(store: Store, save_bytes: int, marked: Iterable[str] = ()) -> int:
    """Return the bytes missing on a local disk for a full save, once the `marked` keys are deleted; 0 if
    there is enough, or if the free space is unknown."""
    free = store.free_bytes() if save_bytes and isinstance(store, LocalStore) else None
    if free is None or free >= room_for(save_bytes):
        return 0
    for key in marked:
        with suppress(NotFound):
            free += store.size(key)
    return max(room_for(save_bytes) - free, 0)
