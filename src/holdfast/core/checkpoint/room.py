"""Room on a disk for one more full save: records end before they take it, and steps that nothing keeps go
for it.

Without it a full disk heals no more.  What would free space, old steps and the records before them, goes
once a newer full save is complete, and that finds no room.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from holdfast.base.errors import NotFound
from holdfast.core.store import LocalStore, Store

SPARE_BYTES = 64 << 10
"""Bytes beyond those of the files: for folders, the manifest, and the last block of each file."""


def room_for(save_bytes: int) -> int:
    """Free bytes that a full save of so many bytes is given; 0 if its size is not known."""
    return save_bytes + save_bytes // 16 + SPARE_BYTES if save_bytes else 0


def lacking(store: Store, save_bytes: int, marked: Iterable[str] = ()) -> int:
    """Bytes that a full save would lack on a local disk from which these keys are gone; 0 if none, or if
    nobody can tell."""
    free = store.free_bytes() if save_bytes and isinstance(store, LocalStore) else None
    if free is None or free >= room_for(save_bytes):
        return 0
    for key in marked:
        with suppress(NotFound):
            free += store.size(key)
    return max(room_for(save_bytes) - free, 0)
