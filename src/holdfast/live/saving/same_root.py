"""Check that all ranks have the same root; a path with a time or a rank in it would differ.

Rank 0 decides where a run goes on.  Ranks with another root would save where rank 0 does not look, or would
find nothing and begin anew.

Ranks exchange the paths of their roots in one message.  Equal paths are accepted, unless inodes differ.
Otherwise each rank reads in its root the file that rank 0 has just written or read in its own: different
paths may lead to one place, by different mounts, and for a load a copy is enough.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

import msgspec

from holdfast.base.errors import HoldfastError, NotFound, UsageError
from holdfast.base.host import boot_id
from holdfast.base.storage_deadlines import bounded
from holdfast.base.wire import decode_json, decode_msgpack
from holdfast.core.checkpoint.claiming import Claim, claim_key
from holdfast.core.checkpoint.names import manifest_key, step_numbers
from holdfast.core.codec.digest import hexdigest
from holdfast.core.group import Group
from holdfast.core.store import LocalStore, Store, get_small

APPEARS_S = 30.0
"""Seconds after which a file of one host is visible on another, on any network file system."""
LISTING_PAUSE_S = 0.5


class _Place(msgspec.Struct, frozen=True, array_like=True):
    """The place of a rank's root."""

    url: str
    path: str
    """Path without links; the URL if the store is no file system."""
    inode: int
    """0 if unknown."""
    host: str


def check_claimed(group: Group, store: Store, mine: Claim) -> None:
    """UsageError on all ranks unless all see rank 0's claim in their root.  Collective; blocks."""

    def look() -> bool:
        seen = decode_json(get_small(store, claim_key(mine.run)), Claim)
        # each of two homes has its own claim, by the same process
        return (seen.run, seen.host, seen.boot, seen.pid) == (
            mine.run,
            mine.host,
            mine.boot,
            mine.pid,
        )

    places = _places(group, store)
    if not _are_alike(places):
        _prove(group, places, look)


def check_listed(group: Group, store: Store, step: int | None) -> None:
    """UsageError on all ranks unless all see the same manifest of `step` (None: of the newest step), or all
    see no step.  Collective; blocks."""
    places = _places(group, store)
    if _are_alike(places):
        return

    def show() -> bytes:
        shown = max(step_numbers(store), default=None) if step is None else step
        return msgspec.json.encode((shown, _seal(store, shown)))

    number, seal = decode_json(group.from_rank0(show), tuple[int | None, str])

    def look() -> bool:
        if number is None:
            return not step_numbers(store)
        return _seal(store, number) == seal

    _prove(group, places, look)


def _seal(store: Store, step: int | None) -> str:
    """Digest of the manifest of a step; empty if there is none."""
    try:
        return "" if step is None else hexdigest(store.get(manifest_key(step)))
    except NotFound:
        return ""


def _places(group: Group, store: Store) -> list[_Place]:
    """Return where each rank's root lies.  Collective."""
    path, inode = store.url, 0
    if isinstance(store, LocalStore):
        root = store.root

        def look() -> tuple[str, int]:
            real = os.path.realpath(root)
            return real, os.stat(real).st_ino

        try:
            path, inode = bounded(look, "look at", root, store.patience.limit_s)
        except (HoldfastError, OSError):
            path = os.path.normpath(root)  # it does not exist yet, or cannot be read
    host = boot_id() or socket.gethostname()
    mine = _Place(store.url, path, inode, host)
    return [decode_msgpack(one, _Place) for one in group.all_gather(msgspec.msgpack.encode(mine))]


def _are_alike(places: list[_Place]) -> bool:
    """True if paths are equal, and no inodes differ."""
    inodes = {one.inode for one in places if one.inode}
    return len({one.path for one in places}) == 1 and len(inodes) < 2


def _prove(group: Group, places: list[_Place], look: Callable[[], bool]) -> None:
    """UsageError on all ranks unless `look` is true on each.  Collective; blocks."""
    is_far = places[group.rank].host != places[0].host
    until = time.monotonic() + (min(APPEARS_S, group.deadline_s / 4) if is_far else 0.0)
    while not (is_same := _sees(look)) and time.monotonic() < until:
        time.sleep(LISTING_PAUSE_S)
    answers = group.all_gather(b"1" if is_same else b"")
    strangers = [rank for rank, answer in enumerate(answers) if not answer]
    if strangers:
        raise _elsewhere(strangers, places)


def _sees(look: Callable[[], bool]) -> bool:
    try:
        return look()
    except (HoldfastError, OSError):
        return False


def _elsewhere(strangers: list[int], places: list[_Place]) -> UsageError:
    first, other = places[0], places[strangers[0]]
    more = (
        f" ({len(strangers)} ranks of {len(places)} look elsewhere)" if len(strangers) > 1 else ""
    )
    if first.url == other.url:
        return UsageError(
            f"rank {strangers[0]} sees other storage under {other.url} than rank 0{more}",
            hint="mount one file system that all hosts share at this path",
        )
    return UsageError(
        f"the roots of ranks 0 and {strangers[0]} differ: {first.url} and {other.url}{more}",
        hint="give all ranks one path: if it has a time, a random part or a rank in it, make it on rank 0 "
        "and broadcast it",
    )
