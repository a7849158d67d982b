"""The protection of snapshots by other ranks: who protects whom, from a replica or by exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from holdfast.base.errors import Corrupt, HoldfastError, OutOfSpace, SegmentLost
from holdfast.base.events import emit, span
from holdfast.base.wire import encode_error, wire_error
from holdfast.core.codec.digest import hexdigest
from holdfast.core.codec.stripes import Stripes
from holdfast.core.format.manifest import FileEntry, decode_manifest
from holdfast.live.saving import Draft, SaveOperation
from holdfast.live.state.carrying import CarriedCopies
from holdfast.live.state.devices import Moment
from holdfast.policy.survival import Scheme
from holdfast.tiers.memory.decision import Decision
from holdfast.tiers.memory.grouping import Grouping, check_room, kept_bytes
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.protect import guard_bytes
from holdfast.tiers.memory.recompute import RecomputedStates
from holdfast.tiers.memory.replica import ReplicaGuard, replica_guard
from holdfast.tiers.memory.slots import lease_of

if TYPE_CHECKING:
    from holdfast.tiers.memory.tier import MemoryTier


@dataclass(frozen=True)
class Agreed:
    """The last protection of the group of this rank: its plan and scheme, and the images."""

    plan: str
    scheme: Scheme
    files: tuple[FileEntry, ...]


def _shape(file: FileEntry) -> tuple[int, ...]:
    """Return the layout of an image: its rank, where its sections begin, and its bytes."""
    return file.rank, file.data, file.extras, file.table, file.bytes


@dataclass(frozen=True)
class Making:
    """The guard of one snapshot, which is what this rank keeps for its group, still to be made in
    the window (`CopyTap`)."""

    protector: Protector
    number: int
    """Number of the operation."""
    guard: ReplicaGuard
    view: memoryview
    shadow: RecomputedStates | None

    @property
    def sources(self) -> list[torch.Tensor]:
        return self.guard.sources

    def run(self, carried: CarriedCopies | None, first: int, ready: Moment | None) -> None:
        self.protector.fill(self, carried, first, ready)


class Protector:
    """The work of one rank for its group, from snapshot to snapshot."""

    def __init__(self, tier: MemoryTier, redundancy: str, shadow: RecomputedStates | None) -> None:
        self._tier = tier
        self.shadow = shadow
        """The optimizer states of other ranks that are redone here, if any are."""
        self._rank = tier.saver.group.rank
        self._agreed: Agreed | None = None
        self._begun: dict[int, tuple[tuple[FileEntry, ...], w.Lease | None]] = {}
        """The files as they were when the guard of a snapshot was begun in the window, and the lease of
        its memory, by number of the operation."""
        self._guard: ReplicaGuard | None = None
        self._guard_key: object = None
        self._guard_mark: object = None
        """The addresses that the guard was planned for, as the plan of copies has them."""
        self._holding = ("", "")
        self._grouping = Grouping(redundancy, self._tell)

    def _tell(self, text: str) -> None:
        if self._rank == 0:
            self._tier.news.append(text)

    # -- saving thread ----------------------------------------------------------------------------

    def begin(self, op: SaveOperation, draft: Draft) -> Making | None:
        """Return what makes, from this rank's own replica, what it keeps for its group; None if it
        holds no replica, or cannot make that now."""
        agreed, plan = self._agreed, draft.plan
        if agreed is None or agreed.plan != plan.digest:
            return None
        me = [f.rank for f in agreed.files].index(self._rank)
        shadow = self._redone()
        redone = shadow.tensors if shadow is not None else {}
        key = (plan.digest, tuple(map(_shape, agreed.files)), id(redone) if redone else None)
        if key != self._guard_key or self._guard_mark is not plan.fingerprint:
            lengths = tuple(f.bytes for f in agreed.files)
            stripes = Stripes(lengths, *agreed.scheme.blocks(len(lengths)))
            aside = self._tier.saver.aside
            self._guard = replica_guard(plan, draft.live, aside, redone, stripes, agreed.files, me)
            self._guard_key, self._guard_mark = key, plan.fingerprint
        guard = self._guard
        if guard is None:
            return None
        try:
            lease = self._tier.lease(op, "guard", guard_bytes(guard.stripes))
            view = self._tier.slots.view(lease.name, draft.live)
        except HoldfastError:
            return None  # the agents will say so when it is their turn
        self._begun = {op.number: (agreed.files, lease)}
        return Making(self, op.number, guard, view, shadow)

    def fill(self, making: Making, *how: Any) -> None:
        """Make it, once the states that are redone here have come to that snapshot; not at all if
        they will not."""
        number, shadow = making.number, making.shadow
        if shadow is not None and not shadow.twins.at(number, self._tier.saver.deadline_s):
            self._begun.pop(number, None)
            return
        making.guard.fill(making.view, *how)
        if shadow is not None:
            shadow.twins.go_on(number)

    # -- memory thread ----------------------------------------------------------------------------

    def holding(self, draft: Draft) -> str:
        """Return a digest of which parts of all tensors this rank holds."""
        if self._holding[0] != draft.plan.digest:
            held = [
                (name, part.box.start, part.box.stop)
                for name, t in draft.live.tensors.items()
                for part in t.parts
            ]
            self._holding = draft.plan.digest, hexdigest(msgspec.msgpack.encode(held))
        return self._holding[1]

    def reserve(self, op: SaveOperation, draft: Draft, decision: Decision) -> None:
        """Get memory for two snapshots of this rank and for what it keeps of its group's; the
        newest snapshot of before the restart is one of the two.

        OutOfSpace, on all ranks, if some node's budget does not hold that; on this one, if its
        agent has not as much left.
        """
        chosen = self._grouping.find(decision)
        check_room(decision, chosen)
        lease, saves = lease_of(draft.buffer), decision.sizes[self._rank] > 0
        share = lease.capacity if lease is not None else 0
        kept = kept_bytes(decision, chosen.scheme, self._in(chosen.groups)) if saves else 0
        held = self._tier.agent.held()
        wanted = [("share", share)] * (1 - self._has(held, "share", share))
        wanted += [("guard", kept)] * (2 - self._has(held, "guard", kept))
        for kind, size in wanted:
            if size:
                try:
                    self._tier.slots.view(self._tier.lease(op, kind, size).name, draft.live)
                except OutOfSpace:
                    if held.newest:  # one of the two is there, and will make room
                        return
                    raise

    def _has(self, held: w.Held, kind: str, size: int) -> bool:
        """True if the newest snapshot is there, in memory that serves for the one after the
        next."""
        return any(
            (i.kind, i.rank, i.attempt) == (kind, self._rank, held.newest)
            and w.fits(i.capacity, size)
            for i in held.images
        )

    def _in(self, found: list[tuple[int, ...]]) -> tuple[int, ...]:
        """This rank's group."""
        return next(g for g in found if self._rank in g)

    def protect(self, op: SaveOperation, draft: Draft, decision: Decision) -> None:
        """Have the agent make what this rank keeps for its group; all ranks have theirs, or none.

        Collective.  RankErrors if it failed anywhere.
        """
        chosen = self._grouping.find(decision)
        scheme, group = chosen.scheme, self._in(chosen.groups)
        if not scheme.losses:
            return
        error = b""
        try:
            with span("snapshot.protect", step=op.step) as fields:
                fields["source"] = self._source(op.number)
                self._ask(op, draft, decision, scheme, group)
        except Exception as failed:
            op.error, error = failed, encode_error(failed)

        def judge(answers: list[bytes]) -> Decision:
            return Decision({r: wire_error(a) for r, a in enumerate(answers) if a})

        self._tier.agree("protected", op, error, judge)

    def _source(self, number: int) -> str:
        """Return the source of what this rank keeps: `peers`, `recomputed` or `replica`."""
        if number not in self._begun:
            return "peers"
        return "recomputed" if self._redone() is not None else "replica"

    def _redone(self) -> RecomputedStates | None:
        """Return the shadow that redoes states of other ranks, if there is one and it is
        current."""
        return self.shadow if self.shadow is not None and self.shadow.twins.current else None

    def _ask(
        self,
        op: SaveOperation,
        draft: Draft,
        decision: Decision,
        scheme: Scheme,
        group: tuple[int, ...],
    ) -> None:
        files = decode_manifest(decision.manifest, "snapshot").file_of
        here = tuple(f for f in map(files.get, group) if f is not None)
        self._agreed = None
        if self._rank not in files or len(here) <= scheme.losses:
            return  # nothing to protect, or nobody to protect it with
        members = tuple(
            w.Member(f.rank, f.bytes, f.table, f.digest, decision.cards[decision.card_of[f.rank]])
            for f in here
        )
        num_data, num_parity = scheme.blocks(len(members))
        stripes = Stripes(tuple(f.bytes for f in here), num_data, num_parity)
        order = w.Protect(
            self._tier.agent.job, "", self._tier.attempt(op), self._rank, members, num_data, num_parity,
            stripes.kept_bytes, guard_bytes(stripes),
        )  # fmt: skip
        begun, lease = self._begun.pop(op.number, ((), None))
        if lease is None or not self._finish_own(op, order, begun, here, lease):
            lease = self._tier.lease(op, "guard", guard_bytes(stripes))
            self._tier.agent.client.ask(msgspec.structs.replace(order, name=lease.name), str)
            self._learn(op.number, draft, here, stripes, lease)
        self._agreed = Agreed(draft.plan.digest, scheme, here)

    def _finish_own(
        self,
        op: SaveOperation,
        order: w.Protect,
        begun: tuple[FileEntry, ...],
        here: tuple[FileEntry, ...],
        lease: w.Lease,
    ) -> bool:
        """Have the agent finish what this rank made from its own replica; False if that is not what
        the others have saved, or could not be checked."""
        if [_shape(f) for f in begun] != [_shape(f) for f in here] or self._guard is None:
            return False
        own = msgspec.structs.replace(
            order,
            name=lease.name,
            begun=tuple(f.extras for f in begun),
            seen=tuple(self._guard.seen),
        )
        shadow = self._redone()
        try:
            self._tier.agent.client.ask(own, str)
        except Corrupt as error:
            emit("replica.differs", error=error.message)
            if shadow is not None:
                shadow.differed()
            return False
        except SegmentLost as error:  # it may have been equal: an agent was out of reach
            emit("beside.failed", step=op.step, error=error.message)
            return False
        if shadow is not None:
            shadow.agreed()
        return True

    def _learn(
        self,
        number: int,
        draft: Draft,
        here: tuple[FileEntry, ...],
        stripes: Stripes,
        lease: w.Lease,
    ) -> None:
        """Let the shadow learn from the copy of another rank's image that the agent has just
        fetched."""
        if self.shadow is None or stripes.num_data > 1:
            return
        me = [f.rank for f in here].index(self._rank)
        view = self._tier.slots.view(lease.name, draft.live)
        for c in stripes.contributions(me):
            image = view[c.at : c.at + c.source.size]
            self.shadow.learn(number, draft.plan, here[c.source.member], draft.live, image)
