"""The ranks of a restart tell each other what the agents of all nodes hold.

Manifests are large, and many agents know the same ones: each manifest is sent to each rank once, and all
other messages name it by its digest.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import msgspec

from holdfast.base.errors import HoldfastError
from holdfast.base.threads import in_threads
from holdfast.base.wire import decode_msgpack
from holdfast.core.codec.digest import hexdigest
from holdfast.core.group import Group
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.fetch import Peer
from holdfast.tiers.memory.node.inventory import ELSEWHERE_S, ELSEWHERE_THREADS, elsewhere

Manifests = dict[bytes, bytes]
"""Encoded manifests, by the digest of their bytes."""


def gather_held(group: Group, job: str, mine: w.Held | None) -> list[w.Held]:
    """Return what all agents hold, also those of nodes that the job no longer runs on, if they
    still answer.

    `mine`: what this node's agent holds, given on one of its ranks.  Collective.
    """
    own = manifests_of([mine] if mine is not None else [])
    briefs = group.all_gather(w.encode(_brief(mine)) if mine is not None else b"")
    helds = {r: decode_msgpack(data, w.Held) for r, data in enumerate(briefs) if data}
    sender_of: dict[bytes, int] = {}
    for rank, held in helds.items():
        for digest in held.manifests:
            sender_of.setdefault(digest, rank)
    known = {
        digest: group.broadcast(own[digest] if rank == group.rank else None, rank)
        for digest, rank in sender_of.items()
    }
    here = [_whole(held, known) for held in helds.values()]
    return here + _held_elsewhere(group, job, here, known)


def tell_finished(job: str, run: int, cards: Iterable[w.Card]) -> None:
    """Tell agents of other nodes that rank 0 has left, with its work done.  An agent out of reach keeps its
    snapshots."""

    def tell(card: w.Card) -> None:
        with suppress(HoldfastError):
            Peer(card, ELSEWHERE_S).tell(f"/v1/{job}/finished/{run}")

    in_threads(tell, list(cards), ELSEWHERE_THREADS)


def _held_elsewhere(group: Group, job: str, here: list[w.Held], known: Manifests) -> list[w.Held]:
    """Return what agents that are not among `here` hold; rank 0 asks them."""

    def ask() -> bytes:
        found = elsewhere(job, here)
        news = {d: m for d, m in manifests_of(found).items() if d not in known}
        return w.encode((list(map(_brief, found)), news))

    kind = tuple[list[w.Held], dict[bytes, bytes]]
    found, news = decode_msgpack(group.from_rank0(ask), kind)
    return [_whole(held, known | news) for held in found]


def manifests_of(helds: Iterable[w.Held]) -> Manifests:
    return {_digest(data): data for held in helds for data in held.manifests}


def _digest(manifest: bytes) -> bytes:
    return hexdigest(manifest).encode()


def _brief(held: w.Held) -> w.Held:
    """Return `held` with digests in the place of its manifests."""
    return msgspec.structs.replace(held, manifests=tuple(map(_digest, held.manifests)))


def _whole(held: w.Held, known: Manifests) -> w.Held:
    """Return `held` with manifests in the place of their digests."""
    return msgspec.structs.replace(held, manifests=tuple(known[d] for d in held.manifests))
