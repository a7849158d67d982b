"""Small values that one rank hands to others through the store of the default process group.

For whoever has other means to make the ranks wait for each other: a value is there once it has been handed,
and stays until it is taken away.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

PREFIX = "holdfast/handed"
LIMIT_S = 60.0
"""Seconds after which a value that ought to be there is missed."""


def _store() -> dist.Store | None:
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.PrefixStore(PREFIX, dist.distributed_c10d._get_default_store())


def hand(key: str, value: bytes) -> None:
    """Set the value of a key, in place of one that is there."""
    store = _store()
    if store is not None:
        store.set(key, value)


def handed(key: str) -> bytes | None:
    """The value of a key, for which it waits `LIMIT_S` at most; None without a process group."""
    store = _store()
    if store is None:
        return None
    store.wait([key], timedelta(seconds=LIMIT_S))
    return bytes(store.get(key))


def take_away(key: str) -> None:
    """Forget a key."""
    store = _store()
    if store is not None:
        store.delete_key(key)
