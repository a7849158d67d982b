"""The plan of all records until the next plan: what they hold, and where it lies in a rank's memory.

All ranks plan together, once: each describes its gradients and the other values that change, and they agree
on a `SegmentPlan`, as for a full save.  After that each rank makes its records alone.  Another plan is
needed when buffers change that did not before, an optimizer has other parameters, extras outgrow their
room, or gradients are not as declared.
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
from holdfast.core.group import Group
from holdfast.core.layout import Mesh
from holdfast.core.store import Store
from holdfast.live.gradient_compression.marks import HALVES, rounded_to
from holdfast.live.ragged import is_ragged
from holdfast.live.state.agreed import Agreement, Description, describe_tensors, merge_descriptions
from holdfast.live.state.named import Collected
from holdfast.tiers.records.optimizers import GRAD, Groups, NamedOptimizer, grad_name, kind_of
from holdfast.tiers.records.packing import SPARSE, pays_to_pack, split_off_sparse
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
"""Dtypes in which rounded gradients are recorded, by the state of such a gradient."""


def record_tensors(
    optimizers: list[NamedOptimizer], values: dict[str, torch.Tensor], dense: Collection[str] = ()
) -> Collected:
    """The tensors of a record; gradients are placed as their parameters.  `dense`: gradients that are
    recorded whole, whatever was declared of them."""
    live = Collected()
    for one in optimizers:
        for name, p in one.params:
            full = grad_name(one.key, name)
            state = GRAD if full in dense or is_ragged(p) else declared_state(p)
            live.add(full, state, p, steady=True)
    for name, tensor in values.items():
        live.add(name, "buffer", tensor, steady=False)
    return live


def declared_state(p: torch.Tensor) -> str:
    """The state of a parameter's gradient by what was declared of it: sparse, rounded or neither."""
    if pays_to_pack(p):
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
    """Give each gradient one state: all ranks record it whole if one of them must, and a rounded one gets
    the dtype in which it is recorded."""
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
        self._num_plans = 0
        """Number of plans so far."""
        self._extras_room = 0
        """Least room for extras in bytes, as they have grown before."""
        self._whole: set[str] = set()
        """Gradients that are recorded whole, whatever was declared of them."""

    def make_room(self, extras_bytes: int) -> None:
        """Leave room for twice these bytes of extras, from the next plan on."""
        self._extras_room = max(self._extras_room, 2 * extras_bytes)

    def record_whole(self, names: Iterable[str], layout: RecordLayout) -> None:
        """Have these gradients recorded whole from the next plan on, as they were not as declared; with a
        rounded one all rounded ones."""
        wrong = set(names)
        self._whole |= wrong
        if layout.rounded & wrong:  # what has changed one of them changes the others, too
            self._whole |= layout.rounded

    def plan(
        self,
        optimizers: list[NamedOptimizer],
        groups: Groups,
        values: dict[str, torch.Tensor],
        extras_bytes: int,
    ) -> RecordPlan:
        """Plan records of these gradients and values, with room for such extras.  Collective; blocks."""
        live = record_tensors(optimizers, values, self._whole)
        self._num_plans += 1
        together = agree(self.group, live, self._mesh, self._num_plans)
        agreement, sparse = split_off_sparse(together, self.group.size)
        plan = SegmentPlan(
            agreement.mesh, agreement.shardings, agreement.tensors, agreement.aliases, sparse
        )
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
        """Check the bound and the free space before any record is made.  Collective if there is a bound."""
        self.space.record_bytes = record_bytes
        is_first = self._num_plans == 1
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
                raise AgentError(error.message, hint=error.hint) from None  # does not end training
        if self.group.rank == 0:
            self.space.look_for_room(self.store)
