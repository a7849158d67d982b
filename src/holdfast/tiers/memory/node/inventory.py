"""The images that the agents of all nodes hold of a job, as a store that the ordinary reader reads.

inventory = Inventory(job, [held, ...], here="agent name")
for manifest in inventory.manifests: ...
Checkpoint(SnapshotStore(inventory), manifest)
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import msgspec

from holdfast.base.errors import Corrupt, FormatError, HoldfastError, NotFound, NotRecoverable
from holdfast.base.events import emit
from holdfast.base.threads import in_threads
from holdfast.base.wire import decode_msgpack
from holdfast.core.codec.stripes import Stripes
from holdfast.core.format.manifest import Manifest, decode_manifest
from holdfast.core.store import LocalStore, Reader, Store
from holdfast.core.store.views import ViewStore
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.fetch import Peer
from holdfast.tiers.memory.node.segment import is_sound, mapped
from holdfast.tiers.memory.node.sources import (
    FileImage,
    ImageReader,
    RebuiltImage,
    RemoteImage,
    TalliedReader,
    Tally,
)

ELSEWHERE_S = 3.0
"""Seconds to wait for answers of nodes that may be gone."""
ELSEWHERE_THREADS = 32

_KEY = re.compile(r"steps/(\d{10,})/([\w.-]+)/r(\d{5,})\.safetensors")

Key = tuple[str, str, int]
"""Kind, attempt and rank of an image or guard."""


@dataclass(frozen=True)
class Location:
    """An image or guard with its name, and the agent that holds it."""

    held: w.Held
    image: w.Slot


class Inventory:
    """The images and guards that each agent holds.  `here`: name of this node's agent, whose files are
    read directly."""

    def __init__(self, job: str, helds: list[w.Held], here: str) -> None:
        self.job = job
        self._lost: set[Key] = set()
        self.renew(helds, here)

    def renew(self, helds: list[w.Held], here: str) -> None:
        """Take new answers of the agents: one that died may have a successor.  What counts as lost
        stays lost."""
        self.here = here
        self.helds = {held.card.agent: held for held in helds}
        self._peers = {h.card.agent: Peer(h.card) for h in helds if h.card.agent != here}
        self._places: dict[Key, Location] = {}
        """Places by kind, attempt and rank; where several agents have one, this node's."""
        for held in sorted(self.helds.values(), key=lambda h: (h.card.agent != here, h.card.agent)):
            for image in held.images:
                key = (image.kind, image.attempt, image.rank)
                if key not in self._lost:
                    self._places.setdefault(key, Location(held, image))

    @cached_property
    def manifests(self) -> list[Manifest]:
        """Manifests of every committed snapshot that some agent knows."""
        found: dict[str, Manifest] = {}
        # most agents know the same ones, whose checks take milliseconds each
        for data in dict.fromkeys(m for held in self.helds.values() for m in held.manifests):
            with suppress(FormatError, Corrupt):
                manifest = decode_manifest(data, "manifest in memory")
                found[manifest.attempt] = manifest
        return list(found.values())

    def find(self, attempt: str) -> Manifest:
        """Return the manifest of an attempt's snapshot, which some agent must know."""
        return next(m for m in self.manifests if m.attempt == attempt)

    def lost_nodes(self, attempt: str = "") -> tuple[str, int]:
        """Return the attempt of a snapshot (default: the newest), and on how many nodes parts of it were
        lost that are in no memory now.

        A node whose agent died is not lost: the successor holds the same.
        """
        manifests = [m for m in self.manifests if attempt in ("", m.attempt)]
        if not manifests:
            return "", 0
        newest = max(manifests, key=lambda m: (m.run, m.step, m.attempt))
        missing = self._missing(newest)
        if not missing:
            return newest.attempt, 0
        there = self._having(newest.attempt)
        had = max((len(held.peers) for held in there), default=0)
        return newest.attempt, min(max(had - len(there), 1), len(missing))

    def cards(self, attempt: str) -> tuple[w.Card, ...]:
        """Return the present cards of the agents that hold part of a snapshot.  As long as some of it is
        in no memory, also those of agents that held part of it and did not answer."""
        there = self._having(attempt)
        found = {held.card.agent: held.card for held in there}
        if self._missing(self.find(attempt)):
            for held in there:
                found |= {c.agent: c for c in held.peers if c.agent not in self.helds}
        return tuple(found[agent] for agent in sorted(found))

    def _having(self, attempt: str) -> list[w.Held]:
        """Return the answers of the agents that hold part of a snapshot."""
        return [h for h in self.helds.values() if any(i.attempt == attempt for i in h.images)]

    def _missing(self, manifest: Manifest) -> list[int]:
        """Return the ranks whose images are in no memory."""
        ranks = {f.rank for f in manifest.files}
        return [r for r in ranks if ("share", manifest.attempt, r) not in self._places]

    def suspects(self, attempt: str, rank: int) -> list[Key]:
        """Return the keys that must count as lost, as this node sees it, after an image proved damaged
        or out of reach.

        For an image that was read where it lies: its own key, or the keys of all that its agent holds
        if the agent is out of reach.  For an image that was rebuilt: the keys of its group that are
        damaged or out of reach.
        """
        share: Key = ("share", attempt, rank)
        if share in self._places:
            return [share] if self._answers(share) else self._held_by(share)
        return [key for key in self._group(attempt, rank) if not self._is_sound(key)]

    def _answers(self, key: Key) -> bool:
        peer = self._peers.get(self._places[key].held.card.agent)
        try:
            return peer is None or bool(peer.get(f"/v1/{self.job}"))
        except HoldfastError:
            return False

    def _held_by(self, key: Key) -> list[Key]:
        """Return the keys of everything that the agent of a key holds."""
        agent = self._places[key].held.card.agent
        return [k for k, place in self._places.items() if place.held.card.agent == agent]

    def lose(self, keys: Iterable[Key]) -> bool:
        """Count keys as lost from now on; False if all of them already were."""
        found = [key for key in keys if self._places.pop(key, None) is not None]
        self._lost.update(found)
        return bool(found)

    def _group(self, attempt: str, rank: int) -> list[Key]:
        """Return the keys of the images and guards that are left of a rank's group."""
        members = next((g.members for g in self._guards(attempt) if rank in g.members), ())
        keys: list[Key] = [(kind, attempt, r) for kind in ("share", "guard") for r in members]
        return [key for key in keys if key in self._places]

    def _guards(self, attempt: str) -> list[w.Slot]:
        found = [
            p.image for (kind, a, _), p in self._places.items() if (kind, a) == ("guard", attempt)
        ]
        return sorted(found, key=lambda image: image.rank)

    def _is_sound(self, key: Key) -> bool:
        """True if an image or guard is what was written; checked on the node that holds it."""
        kind, attempt, rank = key
        place = self._places[key]
        peer = self._peers.get(place.held.card.agent)
        try:
            if peer is None:
                with mapped(
                    Path(place.held.directory) / place.image.name, place.image.bytes
                ) as view:
                    return is_sound(view, place.image.table, place.image.digest)
            return peer.get(f"/v1/{self.job}/{attempt}/{kind}/{rank}/check") == b"sound"
        except (HoldfastError, OSError, ValueError):
            return False

    def raw(self, kind: str, attempt: str, rank: int, key: str) -> FileImage | RemoteImage:
        """Return a reader of an image, or of a guard, where it lies.  NotFound."""
        place = self._places.get((kind, attempt, rank))
        if place is None:
            raise NotFound(f"the {kind} of rank {rank} is in no node's memory", key=key)
        if place.held.card.agent != self.here:
            peer = self._peers[place.held.card.agent]
            return RemoteImage(peer, f"/v1/{self.job}/{attempt}/{kind}/{rank}", key)
        try:
            reader = LocalStore(place.held.directory).open(place.image.name)
            return FileImage(reader, "local")
        except NotFound as error:
            raise NotFound(error.message, key=key) from None

    def reader(self, attempt: str, rank: int, key: str) -> ImageReader:
        """Return a reader of a rank's image, where it lies or rebuilt; NotFound says why there is none."""
        if ("share", attempt, rank) in self._places:
            return self.raw("share", attempt, rank, key)
        guard = next((g for g in self._guards(attempt) if rank in g.members), None)
        if guard is None:
            raise NotFound(f"the image of rank {rank} is in no node's memory", key=key)
        files = self.find(attempt).file_of
        lengths = tuple(files[r].bytes for r in guard.members)
        stripes = Stripes(lengths, guard.num_data, guard.num_parity)
        lost = {
            i
            for i, r in enumerate(guard.members)
            if ("share", attempt, r) not in self._places
            or ("guard", attempt, r) not in self._places
        }
        member = guard.members.index(rank)
        try:
            stripes.sources(lost, member, 0, lengths[member])
        except NotRecoverable as error:
            raise NotFound(error.message, key=key, hint=error.hint) from None
        emit("memory.rebuilt", key=key, lost=[guard.members[i] for i in sorted(lost)])
        opener = partial(self._open_area, attempt, guard.members, key)
        return RebuiltImage(stripes, frozenset(lost), member, opener)

    def _open_area(
        self, attempt: str, members: tuple[int, ...], key: str, member: int, area: str
    ) -> Reader:
        return self.raw("share" if area == "share" else "guard", attempt, members[member], key)


def elsewhere(job: str, helds: list[w.Held]) -> list[w.Held]:
    """Return the answers of agents that took part in the newest commits and are not in `helds`, as far
    as they answer."""
    known = {held.card.agent for held in helds}
    cards = {c.agent: c for held in helds for c in held.peers if c.agent not in known}
    found: list[w.Held] = []

    def ask(card: w.Card) -> None:
        with suppress(HoldfastError, msgspec.DecodeError):
            data = Peer(card, ELSEWHERE_S).get(f"/v1/{job}")
            found.append(decode_msgpack(data, w.Held))

    in_threads(ask, list(cards.values()), max(min(len(cards), ELSEWHERE_THREADS), 1))
    return sorted(found, key=lambda held: held.card.agent)


class SnapshotStore(ViewStore):
    """The snapshots in memory; images that memory lacks are read from `behind`.

    `tally`: what was read, and from where.
    """

    shows = "what agents hold"

    def __init__(self, inventory: Inventory, behind: Store | None = None) -> None:
        self.url = "memory of the nodes"
        self._inventory = inventory
        self._behind = behind
        self.tally = Tally()

    def open(self, key: str) -> Reader:
        """Return a range reader of one image."""
        return TalliedReader(self._find(key), key, self.tally)

    def _find(self, key: str) -> ImageReader:
        attempt, rank = _parse(key)
        try:
            return self._inventory.reader(attempt, rank, key)
        except NotFound as error:
            reason = error
        if self._behind is not None:
            try:
                stored = FileImage(self._behind.open(key), "storage")
                emit("memory.from_storage", key=key)
                return stored
            except NotFound:
                pass  # the error says why memory lacks it
        raise reason

    def size(self, key: str) -> int:
        attempt, rank = _parse(key)
        return self._inventory.find(attempt).file_of[rank].bytes


def image_of(key: str | None) -> tuple[str, int] | None:
    """Return (attempt, rank) of the image with that key in a store; None if it is no image's key."""
    match = _KEY.fullmatch(key or "")
    return (match[2], int(match[3])) if match else None


def _parse(key: str) -> tuple[str, int]:
    found = image_of(key)
    if found is None:
        raise NotFound("no such key among the snapshots in memory", key=key)
    return found
