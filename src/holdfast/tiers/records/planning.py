"""The plan of all records until the next plan: what they hold, and where it lies in a rank's memory.

All ranks plan together, once: each describes the gradients and the values that change beside them, and they
agree on a `SegmentPlan`, as for a full save.  After that every record is made by each rank alone.  Another
plan is needed when buffers change that did not before, an optimizer has other parameters, extras outgrow
their room, or gradients prove to be other than was declared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from holdfast.base.errors import AgentError, UsageError
from holdfast.base.wire import decode_msgpack
from holdfast.core.checkpoint.peers import raise_on_all
from holdfast.core.codec.digest import hexdigest
from holdfast.core.format.image import ALIGN
from holdfast.core.format.manifest import TensorEntry
from holdfast.core.group import Group
from holdfast.core.layout import Mesh
from holdfast.core.store import Store
from holdfast.live.compression.marks import HALVES, rounded_to
from holdfast.live.state.agreed import Agreement, Description, describe_tensors, merge_descriptions
from holdfast.live.state.named import Collected
from holdfast.tiers.records.optimizers import GRAD, Groups, NamedOptimizer, grad_name, kind_of
from holdfast.tiers.records.packing import SPARSE, parted, pays
from holdfast.tiers.records.places import RecordLayout
from holdfast.tiers.records.segment import (
    SegmentHeader,
    SegmentPlan,
    aligned,
    encode_header,
    put_plan,
)
from holdfast.tiers.records.space import Space, needed_bytes

SPARE_ROOM = 4 << 10
"""Bytes left free for extras that grow."""
ROUNDED = {str(dtype).removeprefix("torch."): dtype for dtype in HALVES}
"""Dtypes of gradients that are recorded in another dtype than their own, by their state."""


def held(
    optimizers: list[NamedOptimizer], values: dict[str, torch.Tensor], dense: Collection[str] = ()
) -> Collected:
    """The tensors of a record; gradients lie as their parameters do.  `dense`: those that are recorded
    whole, whatever was declared of them."""
    live = Collected()
    for one in optimizers:
        for name, p in one.params:
            full = grad_name(one.key, name)
            state = GRAD if full in dense else declared(p)
            live.add(full, state, p, steady=True)
    for name, tensor in values.items():
        live.add(name, "buffer", tensor, steady=False)
    return live


def declared(p: torch.Tensor) -> str:
    """The state that a parameter's gradient counts as, by what was declared of it."""
    if pays(p):
        return SPARSE
    dtype = rounded_to(p)
    return GRAD if dtype is None else str(dtype).removeprefix("torch.")


def agree(group: Group, live: Collected, mesh: Mesh | None, number: int) -> Agreement:
    """Agree on what the records of all ranks hold together.  Collective; blocks."""

    def together(answers: list[bytes]) -> bytes:
        kinds = list(dict.fromkeys(answers))
        merged = merge_descriptions(kinds, [kinds.index(a) for a in answers], mesh)
        return msgspec.msgpack.encode(_one_state(merged, kinds))

    data = group.ask(
        f"delta/plan/{number}", describe_tensors(live), together, awaited="planned its records"
    )
    return decode_msgpack(data, Agreement)


def _one_state(agreement: Agreement, descriptions: list[bytes]) -> Agreement:
    """A gradient that one rank has to record whole is recorded whole by all; one that is rounded counts as
    of that dtype."""
    docs = [decode_msgpack(d, Description) for d in descriptions]
    dense = {t.name for doc in docs for t in doc.tensors if t.state == GRAD}
    tensors = []
    for t in agreement.tensors:
        if t.name in dense:
            t = msgspec.structs.replace(t, state=GRAD)
        elif t.state in ROUNDED:
            t = msgspec.structs.replace(t, state=GRAD, dtype=t.state)
        tensors.append(t)
    return msgspec.structs.replace(agreement, tensors=tuple(tensors))


def plan_of(agreement: Agreement, sparse: tuple[TensorEntry, ...]) -> SegmentPlan:
    return SegmentPlan(
        agreement.mesh, agreement.shardings, agreement.tensors, agreement.aliases, sparse
    )


def encode_extras(extras: dict[str, Any]) -> bytes:
    return msgspec.json.encode(extras)


@dataclass(frozen=True)
class RecordPlan:
    """The layout of a rank's records, and the header of the segments that they will be in."""

    layout: RecordLayout
    header: SegmentHeader


class RecordPlanner:
    """Plans records together with the other ranks."""

    def __init__(
        self, group: Group, store: Store, space: Space, *, run: int, mesh: Mesh | None
    ) -> None:
        self.group = group
        self.store = store
        self.space = space
        self.run = run
        self._mesh = mesh
        self._plans = 0
        """Number of plans so far."""
        self._extras_room = 0
        """Bytes of room for extras, at least; they have grown before."""
        self._whole: set[str] = set()
        """Gradients that are recorded whole, whatever was declared of them."""

    def make_room(self, extras_bytes: int) -> None:
        """Leave room for extras of twice that size, from the next plan on."""
        self._extras_room = max(self._extras_room, 2 * extras_bytes)

    def record_whole(self, names: Iterable[str], layout: RecordLayout) -> None:
        """Have these gradients recorded whole from the next plan on: they were not as declared."""
        wrong = set(names)
        self._whole |= wrong
        if layout.rounded & wrong:  # what computes with one of them does with the others
            self._whole |= layout.rounded

    def plan(
        self,
        optimizers: list[NamedOptimizer],
        groups: Groups,
        values: dict[str, torch.Tensor],
        extras_bytes: int,
    ) -> RecordPlan:
        """Plan records of these gradients and values, with room for such extras.  Collective; blocks."""
        live = held(optimizers, values, self._whole)
        self._plans += 1
        together = agree(self.group, live, self._mesh, self._plans)
        agreement, sparse = parted(together, self.group.size)
        plan = plan_of(agreement, sparse)
        if self.group.rank == 0:
            put_plan(self.store, self.run, plan)
        room = aligned(max(self._extras_room, extras_bytes * 5 // 4 + SPARE_ROOM))
        layout = RecordLayout.of(agreement, sparse, self.group.rank, live, optimizers, room)
        header = SegmentHeader(
            self.run,
            self.group.rank,
            self.group.size,
            hexdigest(msgspec.json.encode(plan)),
            groups,
            {one.key: kind_of(one.optimizer) for one in optimizers},
            modules={one.key: one.modules for one in optimizers},
        )
        self._check_space(aligned(layout.image.total_bytes) + len(encode_header(header)) + ALIGN)
        return RecordPlan(layout, header)

    def _check_space(self, record_bytes: int) -> None:
        """Check for room before anything is recorded.  Collective if there is a bound."""
        self.space.record_bytes = record_bytes
        is_first = self._plans == 1
        if self.space.max_bytes:
            if is_first:
                there = self.group.from_rank0(lambda: str(needed_bytes(self.store)).encode())
                self.space.add(int(there) // self.group.size)
            try:
                with raise_on_all(self.group, 0):
                    self.space.check()
            except UsageError as error:
                if is_first:
                    raise
                raise AgentError(error.message, hint=error.hint) from None  # training goes on
        if self.group.rank == 0:
            self.space.look_for_room(self.store)
