"""Planning a save: what all ranks agree on, and where this rank's bytes go.

A plan is made once and holds for the saves that follow, until some rank's description changes.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from holdfast.capture.job import SaveJob, SavePlan, new_plan
from holdfast.codec.digest import hexdigest
from holdfast.errors import HoldfastError, RuleError, UsageError
from holdfast.format.image import ALIGN, Image, plan_image
from holdfast.garbage import uncollected
from holdfast.group import Group
from holdfast.layout import Mesh
from holdfast.state.agreed import Agreement, merge
from holdfast.state.live import INLINE_BYTES
from holdfast.state.protocol import ReadyToSave, Verdict, check_kinds, sort_extras
from holdfast.state.snapshot import Copies, Kept, fingerprint
from holdfast.wire import WireError

MOST_COPIES = 4
"""Number of lists of copies that are kept at most, by the memory that they fill."""


class Planner:
    """The plan of a run's saves.  `agree` and `make_plan` are collective."""

    def __init__(self, group: Group, mesh: Mesh | None, deadline_s: float) -> None:
        self.group = group
        self.mesh = mesh
        self.deadline_s = deadline_s
        self.plan: SavePlan | None = None
        self._proposed: list[str] = []
        self._kinds: list[str] | None = None
        """On rank 0: the digests of the descriptions that the plan was made from, by rank."""

    def agree(self, job: SaveJob) -> Verdict:
        extras = {
            k: (
                hexdigest(msgspec.json.encode([v, job.live.contents.get(k, [])], order="sorted")),
                job.live.rules.get(k, ""),
            )
            for k, v in job.live.extras.items()
        }
        held = self.plan.digest if self.plan else ""
        error = None if job.error is None else WireError.of(job.error)
        large = [k for k in extras if k in job.live.contents]
        digest, kinds = hexdigest(job.description), job.live.kinds
        ready = ReadyToSave(job.step, job.busy, digest, held, extras, error, large, kinds)
        answer = self.group.ask(
            f"agree/{job.number}",
            msgspec.msgpack.encode(ready),
            self._judge,
            self.deadline_s,
            f"begun {job.in_words}",
        )
        return msgspec.msgpack.decode(answer, type=Verdict)

    def _judge(self, answers: list[bytes]) -> bytes:
        """Rank 0: may this save go on, and how?"""
        ready = [msgspec.msgpack.decode(a, type=ReadyToSave) for a in answers]
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
        _check_large(ready, per_rank)
        return msgspec.msgpack.encode(Verdict(True, describing, per_rank, send))

    def make_plan(self, job: SaveJob, describing: list[int]) -> None:
        mine = job.description if self.group.rank in describing else b""
        data = self.group.ask(
            f"plan/{job.number}",
            mine,
            lambda answers: self._merge([answers[rank] for rank in describing], describing),
            self.deadline_s,
            f"planned {job.in_words}",
        )
        with uncollected():
            agreement = msgspec.msgpack.decode(data, type=Agreement)
            self.plan = new_plan(agreement, hexdigest(data))
        self.plan.description = job.description

    def _merge(self, docs: list[bytes], describing: list[int]) -> bytes:
        kinds = self._proposed
        order = {kinds[rank]: i for i, rank in enumerate(describing)}
        with uncollected():
            agreement = merge(docs, [order[k] for k in kinds], self.mesh)
            self._kinds = kinds
            return msgspec.msgpack.encode(agreement)

    def forget(self, view: memoryview) -> None:
        """This memory is filled no more.  From any thread."""
        if self.plan is not None:
            self.plan.copies.pop(id(view), None)

    @uncollected()
    def lay_out(self, job: SaveJob, aside: Kept) -> Image:
        """The image for this save: the last one, if nothing that it depends on has changed."""
        plan, verdict, buffer = self.plan, job.verdict, job.buffer
        assert plan is not None and verdict is not None and buffer is not None
        if plan.description != job.description:
            raise HoldfastError("the state differs from what the ranks have planned together")
        own = {k: v for k, v in job.live.extras.items() if k in verdict.per_rank}
        kept = plan.image is not None and plan.image.extras_bytes > 0
        data = msgspec.json.encode(own) if own or kept else b""
        image = plan.image
        if image is None or len(data) > image.extras_bytes:
            room = -(-len(data) * 5 // 4 // ALIGN) * ALIGN if data else 0
            pieces = plan.placement.pieces(self.group.rank)
            image = plan.image = plan_image(plan.agreement.tensors, pieces, extras_bytes=room)
            plan.copies.clear()
        view = buffer.reserve(image.memory_bytes, job.live)
        mark = fingerprint(job.live)
        if mark != plan.fingerprint:
            plan.copies.clear()
            plan.fingerprint = mark
        if id(view) not in plan.copies:
            if len(plan.copies) == MOST_COPIES:
                plan.copies.clear()
            copies = Copies.plan(image, plan.agreement.tensors, job.live, aside, view)
            plan.copies[id(view)] = view, copies
        job.copies = plan.copies[id(view)][1]
        view[image.extras_start : image.table_start] = data.ljust(image.extras_bytes)
        return image


def _check_large(ready: list[ReadyToSave], per_rank: Iterable[str]) -> None:
    """RuleError for extras that each rank keeps for itself and that refer to tensors, which it does not."""
    large = {key for r in ready for key in r.large}
    for key in (k for k in per_rank if k in large):
        raise RuleError(
            f"{key!r} differs between ranks and holds tensors of more than {INLINE_BYTES} bytes",
            hint=f"Checkpointer(on_resize={{{key!r}: 'fresh'}}) keeps each rank's (and none where ranks "
            "are arranged otherwise); or save such tensors under names per rank",
        )
