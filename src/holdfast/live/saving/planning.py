"""Planning a save: the agreement of all ranks, and the places of this rank's bytes.

A plan is made once, and used for later saves until a rank's description changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.base.errors import HoldfastError, UsageError
from holdfast.base.gc_pause import uncollected
from holdfast.base.wire import WireError, decode_msgpack
from holdfast.core.codec.digest import ALGORITHM, CHUNK_BYTES, hexdigest
from holdfast.core.format.image import ALIGN, Image, plan_image
from holdfast.core.format.manifest import FORMAT_VERSION, Manifest
from holdfast.core.group import Group
from holdfast.core.layout import Mesh
from holdfast.core.layout.pieces import Placement
from holdfast.live.saving.messages import ReadyToSave, Verdict, check_kinds, digests, sort_extras
from holdfast.live.state.agreed import Agreement, merge_descriptions
from holdfast.live.state.named import Collected
from holdfast.live.state.snapshot import Copies, SetAside, fingerprint

if TYPE_CHECKING:
    from holdfast.live.saving.operation import AgreedSave, SaveOperation

MOST_COPIES = 4
"""Most lists of copies that are kept, one for each memory that they fill."""


PlannedImage = tuple[Image, Copies]
"""An image, and the copies that fill it in its memory."""


@dataclass
class SavePlan:
    """An agreement and what follows from it for this rank."""

    agreement: Agreement
    digest: str
    placement: Placement
    image: Image | None = None
    copies: dict[int, tuple[memoryview, Copies]] = field(default_factory=dict)
    """Memory and the copies that fill it, by the id of the memory."""
    fingerprint: Any = None
    description: bytes = b""


def new_plan(agreement: Agreement, digest: str) -> SavePlan:
    """Return the plan, with the placement in closed form, that follows from an agreement."""
    shell = Manifest(
        FORMAT_VERSION, 0, 0, "", "", {}, agreement.mesh, CHUNK_BYTES, ALGORITHM,
        agreement.shardings, agreement.tensors, agreement.aliases, (), {}, {},
    )  # fmt: skip
    return SavePlan(agreement, digest, shell.placement)


class Planner:
    """The plan of a run's saves.  `agree` and `make_plan` are collective."""

    def __init__(self, group: Group, mesh: Mesh | None, deadline_s: float) -> None:
        self.group = group
        self.mesh = mesh
        self.deadline_s = deadline_s
        self.plan: SavePlan | None = None
        self._proposed: list[str] = []
        self._told: set[str] = set()
        """Keys of optimizers and names of state whose difference between ranks the user was warned of."""
        self._kinds: list[str] | None = None
        """On rank 0: the digests of the descriptions behind the plan, by rank."""

    def agree(self, op: SaveOperation, description: bytes) -> Verdict:
        """Send this rank's `ReadyToSave`, and return rank 0's answer."""
        live = op.live
        extras = digests(live)
        held = self.plan.digest if self.plan else ""
        error = None if op.error is None else WireError.of(op.error)
        large = [k for k in extras if k in live.contents]
        busy, digest, kinds = op.request.busy, hexdigest(description), live.kinds
        sample = op.saver.sample(op, description)
        ready = ReadyToSave(op.step, busy, digest, held, extras, error, large, sample, kinds)
        answer = self.group.ask(
            f"agree/{op.number}",
            msgspec.msgpack.encode(ready),
            self._judge,
            self.deadline_s,
            f"begun {op.in_words}",
        )
        return decode_msgpack(answer, Verdict)

    def _judge(self, answers: list[bytes]) -> bytes:
        """On rank 0: decide whether the save goes on, and how."""
        ready = [decode_msgpack(a, ReadyToSave) for a in answers]
        for rank, r in enumerate(ready):
            if r.step != ready[0].step:
                raise UsageError(f"rank {rank} saves step {r.step}, rank 0 step {ready[0].step}")
        errors = {rank: r.error for rank, r in enumerate(ready) if r.error is not None}
        if errors:
            return msgspec.msgpack.encode(Verdict(False, [], {}, {}, errors))
        if any(r.busy for r in ready):
            return msgspec.msgpack.encode(Verdict(False, [], {}, {}))
        check_kinds(ready)
        kinds = [r.description for r in ready]
        describing: list[int] = []
        held = {r.agreement for r in ready}
        if kinds != self._kinds or len(held) != 1 or "" in held:
            describing = [kinds.index(k) for k in dict.fromkeys(kinds)]
            self._kinds, self._proposed = None, kinds  # the plan holds when all ranks have it
        per_rank, send = sort_extras(ready)
        if per_rank:
            from holdfast.live.saving.merging import check_own

            check_own(ready, per_rank, self._told)
        verdict = Verdict(True, describing, per_rank, send, {})
        if len(ready) == 1:
            return msgspec.msgpack.encode(verdict)
        if any(r.extras.keys() != ready[0].extras.keys() for r in ready):
            from holdfast.live.saving.missing_notices import tell_keys

            tell_keys(ready, self._told)
        from holdfast.live.state.replica_sampling import differing_classes

        following, doubted = differing_classes([r.sample for r in ready])
        verdict = msgspec.structs.replace(
            verdict, doubted=[] if describing else doubted, round=following
        )
        return msgspec.msgpack.encode(verdict)

    def plan_for(self, op: SaveOperation, description: bytes, verdict: Verdict) -> SavePlan:
        """Return the plan of a save on which all ranks have agreed.  Collective if it is a new one."""
        if self.plan is None or verdict.describe:
            self.plan = self.make_plan(op, description, verdict.describe)
        return self.plan

    def make_plan(self, op: SaveOperation, description: bytes, describing: list[int]) -> SavePlan:
        """Make a plan from the descriptions of the `describing` ranks, which stand for all.  Collective."""
        data = self.group.ask(
            f"plan/{op.number}",
            description if self.group.rank in describing else b"",
            lambda answers: self._merge([answers[rank] for rank in describing], describing),
            self.deadline_s,
            f"planned {op.in_words}",
        )
        with uncollected():
            agreement = decode_msgpack(data, Agreement)
            plan = new_plan(agreement, hexdigest(data))
        plan.description = description
        return plan

    def _merge(self, docs: list[bytes], describing: list[int]) -> bytes:
        kinds = self._proposed
        order = {kinds[rank]: i for i, rank in enumerate(describing)}
        with uncollected():
            of_rank = [order[k] for k in kinds]
            agreement = merge_descriptions(docs, of_rank, self.mesh)
        if len(docs) > 1:
            from holdfast.live.saving.missing_notices import tell_tensors

            tell_tensors(docs, of_rank, self._told)
        with uncollected():
            self._kinds = kinds
            return msgspec.msgpack.encode(agreement)

    def forget(self, view: memoryview) -> None:
        """Drop the copies into a memory that is no longer used.  From any thread."""
        if self.plan is not None:
            self.plan.copies.pop(id(view), None)

    @uncollected()
    def lay_out(self, agreed: AgreedSave, live: Collected, aside: SetAside) -> PlannedImage:
        """Return the image of this save, the last one if possible, and the copies that fill it."""
        plan = agreed.plan
        if plan.description != agreed.description:
            raise HoldfastError("the state differs from the plan of the ranks")
        own = {k: v for k, v in live.extras.items() if k in agreed.verdict.per_rank}
        kept = plan.image is not None and plan.image.extras_bytes > 0
        data = msgspec.json.encode(own) if own or kept else b""
        image = plan.image
        if image is None or len(data) > image.extras_bytes:
            room = -(-len(data) * 5 // 4 // ALIGN) * ALIGN if data else 0
            pieces = plan.placement.pieces(self.group.rank)
            image = plan.image = plan_image(plan.agreement.tensors, pieces, extras_bytes=room)
            plan.copies.clear()
        view = agreed.buffer.reserve(image.memory_bytes, live)
        mark = fingerprint(live, aside)
        if mark != plan.fingerprint:
            plan.copies.clear()
            plan.fingerprint = mark
        if id(view) not in plan.copies:
            if len(plan.copies) == MOST_COPIES:
                plan.copies.clear()
            copies = Copies.plan(image, plan.agreement.tensors, live, aside, view)
            plan.copies[id(view)] = view, copies
        view[image.extras_start : image.table_start] = data.ljust(image.extras_bytes)
        return image, plan.copies[id(view)][1]
