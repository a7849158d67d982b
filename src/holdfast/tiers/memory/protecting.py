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
    """The last protection of this rank's group: its plan and scheme, and the images."""

    plan: str
    scheme: Scheme
    files: tuple[FileEntry, ...]


def _shape(file: FileEntry) -> tuple[int, ...]:
    """Return the layout of an image: its rank, where its sections begin, and its bytes."""
    return file.rank, file.data, file.extras, file.table, file.bytes


@dataclass(frozen=True)
class Making:
    """The guard of one snapshot, which is to be made in the window (`CopyTap`)."""

    protector: Protector
    number: int
    """Number of the operation."""
    guard: ReplicaGuard
    view: memoryview
    recomputed: RecomputedStates | None

    @property
    def sources(self) -> list[torch.Tensor]:
        return self.guard.sources

    def run(self, carried: CarriedCopies | None, first: int, ready: Moment | None) -> None:
        self.protector.fill(self, carried, first, ready)


class Protector:
    """The work of one rank for its group, at each snapshot."""

    def __init__(
        self, tier: MemoryTier, redundancy: str, recomputed: RecomputedStates | None
    ) -> None:
        self._tier = tier
        self.recomputed = recomputed
        """The optimizer states of another rank that are recomputed here, if any are."""
        self._rank = tier.saver.group.rank
        self._agreed: Agreed | None = None
        self._begun: dict[int, tuple[tuple[FileEntry, ...], w.Lease | None]] = {}
        """By number of the operation, for guards that were begun in the window: the files, as they were
        then, and the lease of the memory."""
        self._guard: ReplicaGuard | None = None
        self._guard_key: object = None
        self._guard_mark: object = None
        """The plan's fingerprint that the guard was made for: it has the addresses of tensors."""
        self._holding = ("", "")
        self._grouping = Grouping(redundancy, self._tell)

    def _tell(self, text: str) -> None:
        if self._rank == 0:
            self._tier.news.append(text)

    # -- saving thread ----------------------------------------------------------------------------

    def begin(self, op: SaveOperation, draft: Draft) -> Making | None:
        """Return what makes this rank's guard from its own replica; None if it holds no replica, or
        cannot make the guard now."""
        agreed, plan = self._agreed, draft.plan
        if agreed is None or agreed.plan != plan.digest:
            return None
        me = [f.rank for f in agreed.files].index(self._rank)
        recomputed = self._current_recomputed()
        tensors = recomputed.tensors if recomputed is not None else {}
        key = (plan.digest, tuple(map(_shape, agreed.files)), id(tensors) if tensors else None)
        if key != self._guard_key or self._guard_mark is not plan.fingerprint:
            lengths = tuple(f.bytes for f in agreed.files)
            stripes = Stripes(lengths, *agreed.scheme.blocks(len(lengths)))
            aside = self._tier.saver.aside
            self._guard = replica_guard(plan, draft.live, aside, tensors, stripes, agreed.files, me)
            self._guard_key, self._guard_mark = key, plan.fingerprint
        guard = self._guard
        if guard is None:
            return None
        try:
            lease = self._tier.lease(op, "guard", guard_bytes(guard.stripes))
            view = self._tier.slots.view(lease.name, draft.live)
        except HoldfastError:
            return None  # `protect` will ask for memory again, and raise
        self._begun = {op.number: (agreed.files, lease)}
        return Making(self, op.number, guard, view, recomputed)

    def fill(self, making: Making, *how: Any) -> None:
        """Make a guard, once the recomputed states have come to its snapshot; not at all if they will
        not."""
        number, recomputed = making.number, making.recomputed
        if recomputed is not None and not recomputed.twins.at(number, self._tier.saver.deadline_s):
            self._begun.pop(number, None)
            return
        making.guard.fill(making.view, *how)
        if recomputed is not None:
            recomputed.twins.go_on(number)

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
        """Get memory for two snapshots of this rank and their guards; the newest snapshot of before the
        restart is one of the two.

        OutOfSpace on all ranks if some node's budget does not hold that; on this rank if its agent has
        less memory left.
        """
        chosen = self._grouping.find(decision)
        check_room(decision, chosen)
        lease, saves = lease_of(draft.buffer), decision.sizes[self._rank] > 0
        share = lease.capacity if lease is not None else 0
        kept = kept_bytes(decision, chosen.scheme, self._own_group(chosen.groups)) if saves else 0
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
        """True if the agent holds the newest snapshot in memory that also fits the one after the next."""
        return any(
            (i.kind, i.rank, i.attempt) == (kind, self._rank, held.newest)
            and w.fits(i.capacity, size)
            for i in held.images
        )

    def _own_group(self, found: list[tuple[int, ...]]) -> tuple[int, ...]:
        """This rank's group."""
        return next(g for g in found if self._rank in g)

    def protect(self, op: SaveOperation, draft: Draft, decision: Decision) -> None:
        """Have the agent make or finish this rank's guard; all ranks have theirs, or none.

        Collective.  RankErrors if it failed anywhere.
        """
        chosen = self._grouping.find(decision)
        scheme, group = chosen.scheme, self._own_group(chosen.groups)
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
        """Return the source of this rank's guard: `peers`, `recomputed` or `replica`."""
        if number not in self._begun:
            return "peers"
        return "recomputed" if self._current_recomputed() is not None else "replica"

    def _current_recomputed(self) -> RecomputedStates | None:
        """Return the recomputed states of another rank, if there are any and they are current."""
        recomputed = self.recomputed
        return recomputed if recomputed is not None and recomputed.twins.current else None

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
        """Have the agent finish the guard that this rank made from its own replica; False if it is not
        of what the others have saved, or could not be checked."""
        if [_shape(f) for f in begun] != [_shape(f) for f in here] or self._guard is None:
            return False
        own = msgspec.structs.replace(
            order,
            name=lease.name,
            begun=tuple(f.extras for f in begun),
            seen=tuple(self._guard.seen),
        )
        recomputed = self._current_recomputed()
        try:
            self._tier.agent.client.ask(own, str)
        except Corrupt as error:
            emit("replica.differs", error=error.message)
            if recomputed is not None:
                recomputed.differed()
            return False
        except SegmentLost as error:  # not compared, as an agent was out of reach
            emit("beside.failed", step=op.step, error=error.message)
            return False
        if recomputed is not None:
            recomputed.agreed()
        return True

    def _learn(
        self,
        number: int,
        draft: Draft,
        here: tuple[FileEntry, ...],
        stripes: Stripes,
        lease: w.Lease,
    ) -> None:
        """Let the recomputed states learn from the copy of another rank's image that the agent has just
        fetched."""
        if self.recomputed is None or stripes.num_data > 1:
            return
        me = [f.rank for f in here].index(self._rank)
        view = self._tier.slots.view(lease.name, draft.live)
        for c in stripes.contributions(me):
            image = view[c.at : c.at + c.source.size]
            self.recomputed.learn(number, draft.plan, here[c.source.member], draft.live, image)
