"""A root of our own: taken by all ranks of a run, and freed of what dead processes left."""

from __future__ import annotations

import os

import msgspec

from holdfast.checkpoint.claiming import Claim, claim, newest_claim
from holdfast.checkpoint.tidying import sweep
from holdfast.errors import HoldfastError, UsageError
from holdfast.events import emit
from holdfast.group import Group
from holdfast.patience import bounded
from holdfast.store import LocalStore, Store, open_store, split_prefix
from holdfast.store.local import sweep as sweep_unfinished


def check_own(url: str | os.PathLike[str]) -> None:
    """UsageError for a root that a prefix calls a foreign checkpoint, or whose scheme is unknown."""
    if split_prefix(os.fspath(url)) is not None:
        from holdfast.interop.detect import split

        prefix = split(os.fspath(url))[0]
        raise UsageError(
            f"{url} names a {prefix} checkpoint; holdfast saves in its own format",
            hint=f"give a root of its own, and restore(source={os.fspath(url)!r}); for a folder of that "
            f"name, write {os.path.join('.', os.fspath(url))!r}",
        )
    open_store(url)  # which touches nothing, and needs no other rank


def claim_together(store: Store, group: Group) -> tuple[Claim, bool]:
    """Rank 0 takes the root for all, and deletes what dead runs left.  Also: whether the run before did
    not end by closing.

    A run on another host may be dead or not: what it left stays until this one has committed a step.
    """

    def take() -> bytes:
        held = newest_claim(store)
        mine = claim(store)
        if held is None or held.is_over():
            sweep(store, mine, 0)
        return msgspec.json.encode((mine, held is not None and held.started != "closed"))

    return msgspec.json.decode(group.from_rank0(take), type=tuple[Claim, bool])


def sweep_host(store: Store) -> None:
    """Delete files that dead processes of this host were writing: no other host can tell that they are
    dead."""
    if isinstance(store, LocalStore) and os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            # by a patience of its own: a root is not stuck because it takes long to look through
            limit_s = store.patience.limit_s
            bounded(lambda: sweep_unfinished(store.root), "sweep", store.root, limit_s)
        except (HoldfastError, OSError) as error:  # below the root may lie what nobody may look at
            emit("sweep.failed", error=str(error))
