"""Small values that one rank passes to others through the store of the default process group.

The caller synchronises the ranks: a value exists from `hand` until `take_away`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from holdfast.base.errors import AgentError, need

_PREFIX = "holdfast/handed"
_LIMIT_S = 60.0
"""Longest wait for a value."""


def _store() -> dist.Store | None:
    if not (dist.is_available() and dist.is_initialized()):
        return None
    (of_job,) = need("torch", dist.distributed_c10d, "_get_default_store")
    return dist.PrefixStore(_PREFIX, of_job())


@contextmanager
def _from_torch(what: str) -> Iterator[None]:
    """Raise errors of torch's store as AgentError."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        raise AgentError(
            f"{what} through the store of the process group: {error}",
            hint="the rank that hosts the store, or has to hand the value, has ended or hangs: its log "
            "says more",
        ) from error


def hand(key: str, value: bytes) -> None:
    """Set the value of a key, or replace it.  AgentError."""
    store = _store()
    if store is not None:
        with _from_torch(f"{key} was not handed to the other ranks"):
            store.set(key, value)


def handed(key: str) -> bytes | None:
    """Wait for the value of a key, at most `_LIMIT_S`; None without a process group.  AgentError."""
    store = _store()
    if store is None:
        return None
    with _from_torch(
        f"{key} was not handed by another rank, for which it waits {_LIMIT_S:g} s at most,"
    ):
        store.wait([key], timedelta(seconds=_LIMIT_S))
        return bytes(store.get(key))


def take_away(key: str) -> None:
    """Delete a key.  AgentError."""
    store = _store()
    if store is not None:
        with _from_torch(f"{key} was not taken away"):
            store.delete_key(key)
