"""Roots: how the ranks of a run take one of ours together."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from holdfast.base.errors import HoldfastError, UsageError
from holdfast.base.events import emit
from holdfast.base.storage_deadlines import bounded
from holdfast.base.wire import decode_json
from holdfast.core.checkpoint import claiming
from holdfast.core.checkpoint.claiming import Claim
from holdfast.core.checkpoint.names import CLAIMED_PARTS, RootKeys, steps_text
from holdfast.core.checkpoint.tidying import sweep
from holdfast.core.store import LocalStore, Store, be_patient, open_store, split_prefix
from holdfast.core.store.local import sweep_temp_files

if TYPE_CHECKING:
    from holdfast.core.group import Group

PATIENT_SHARE = 0.9
"""Share of the deadline between ranks that one of several waits for storage."""


def require_native_root(url: str | os.PathLike[str]) -> None:
    """UsageError for a root that a prefix calls a foreign checkpoint, or whose scheme is unknown."""
    if split_prefix(os.fspath(url)) is not None:
        from holdfast.formats.read.detect import split_format

        prefix = split_format(os.fspath(url))[0]
        raise UsageError(
            f"{url} names a {prefix} checkpoint; holdfast saves in its own format",
            hint=f"give a root of its own, and restore(source={os.fspath(url)!r}); for a folder of that "
            f"name, write {os.path.join('.', os.fspath(url))!r}",
        )
    open_store(url)  # which touches nothing, and needs no other rank


def open_shared(url: str | os.PathLike[str], group: Group) -> Store:
    """Open a store of our own that all ranks reach.  What it does not answer is given up in time for the
    other ranks to hear why, before they would give up on this one."""
    store = open_store(os.fspath(url))
    be_patient(store, patience_s(group))
    if group.size > 1 and store.url.startswith("memory://"):
        raise UsageError(
            f"{store.url} is in the memory of one process; {group.size} ranks need a path"
        )
    return store


def patience_s(group: Group) -> float:
    """Seconds that this rank waits for storage, so that others hear of it within the deadline."""
    return group.deadline_s * (PATIENT_SHARE if group.size > 1 else 1.0)


def claim_root(store: Store, group: Group, best: tuple[str, str] | None) -> tuple[Claim, bool, str]:
    """Rank 0 takes the root for all, and deletes what dead runs left.  Also: whether the run before did
    not end by closing; and which steps there are, in words.  `best`: as in `Claim`.

    A run on another host may be dead or not: what it left stays until this one has committed a step.
    """

    def take() -> bytes:
        with RootKeys(store, below=CLAIMED_PARTS) as keys:
            mine, held = claiming.take_root(store, keys, best=best)
            if held is None or held.is_over():
                sweep(store, mine, 0, keys)
        crashed = held is not None and held.started != "closed"
        return msgspec.json.encode((mine, crashed, steps_in(keys)))

    return decode_json(group.from_rank0(take), tuple[Claim, bool, str])


def steps_in(*homes: RootKeys) -> str:
    """The steps of some homes, in words; empty if there are none."""
    steps = {step for keys in homes for step in keys.manifests}
    return steps_text([*steps], 3) if steps else ""


def sweep_host(store: Store) -> None:
    """Delete files that dead processes of this host were writing: no other host can tell that they are
    dead."""
    if isinstance(store, LocalStore) and os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            # by a patience of its own: a root is not stuck because it takes long to look through
            limit_s = store.patience.limit_s
            bounded(lambda: sweep_temp_files(store.root), "sweep", store.root, limit_s)
        except (HoldfastError, OSError) as error:  # below the root may lie what nobody may look at
            emit("sweep.failed", error=str(error))
