"""The record under way: a slot of the ring, the copies into it, and its way to the writer.

    optimizer.step()                    Checkpointer.step()
      gradients ── copies ──┐             buffers, extras ──┐
                            ▼                               ▼
                     a slot of the ring ────────────────── sealed ──► queue ──► writer ──► log

The gradients are copied when an optimizer's step begins (`copying`).  The caller adds buffers and extras;
then the copying thread, after its copies, hands the record to the writer.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from holdfast.base.errors import AgentError, Deadline, HoldfastError
from holdfast.base.events import emit, span
from holdfast.base.memory_limit import memory_bytes
from holdfast.base.storage_deadlines import slowest
from holdfast.core.group import Group
from holdfast.core.layout import Mesh
from holdfast.core.store import Store
from holdfast.live.saving.progress import TierProgress
from holdfast.live.state.devices import devices_of, lock_pages
from holdfast.live.state.gradient_copies import is_torchs
from holdfast.live.state.observer import hooks_after
from holdfast.live.state.optimizers import encoded_hyper_parameters
from holdfast.tiers.records.copying import GradientCopier, OpenRecord
from holdfast.tiers.records.optimizers import (
    Groups,
    NamedOptimizer,
    check_grad,
    missing_of,
)
from holdfast.tiers.records.options import Delta
from holdfast.tiers.records.places import places
from holdfast.tiers.records.planning import RecordPlan, RecordPlanner
from holdfast.tiers.records.queue import Queue
from holdfast.tiers.records.ring import Ring
from holdfast.tiers.records.segment import Applied, Identity, Record, aligned
from holdfast.tiers.records.space import Space

LEAST_S = 0.1
HURRY_S = 1.0
"""Seconds to wait until a record has reached its writer, if training does not wait for storage."""
MEMORY_SHARE = 16
"""Where batches are tuned, records take at most this fraction (1/16) of a rank's share of its node's
memory."""


@dataclass(frozen=True)
class RecordMemory:
    """The memory in which records of a plan are made and wait.  `batch`: records per file."""

    plan: RecordPlan
    ring: Ring
    batch: int


@dataclass
class WayToStorage:
    """The way of records to storage.  It holds no reference to the state."""

    copier: GradientCopier
    queue: Queue

    def handed_over(self, limit_s: float) -> None:
        """Wait until the writer has every record, which then outlives this process.  Deadline."""
        try:
            self.copier.settle(limit_s)
        except TimeoutError:
            raise Deadline(
                "records were not all with their writer when the time to wait for them was over",
                hint=slowest() or "the process that writes records does not take them",
            ) from None

    def flush(self, limit_s: float) -> None:
        """Wait until every record so far is in storage.  Deadline; the writer's error."""
        until = time.monotonic() + limit_s
        self.handed_over(limit_s)
        if self.queue.error is None:
            self.queue.flush(max(until - time.monotonic(), LEAST_S))


class RecordCapture:
    """Makes one record after another, in the planned layout."""

    def __init__(
        self,
        group: Group,
        store: Store,
        options: Delta,
        *,
        run: int,
        mesh: Mesh | None,
        deadline_s: float,
        tell: Callable[[str], None],
    ) -> None:
        self.open: OpenRecord | None = None
        self.failure: HoldfastError | None = None
        """Why a record could not be made, or did not reach the writer."""
        self.recorded = False
        """True if this run has made records."""
        self.batch = options.batch
        """Records per file, from the next `reopen` on."""
        self.space = Space(options.bound, group.size)
        self.progress = TierProgress()
        """The records in storage, and those on their way there."""
        self._options = options
        self._deadline_s = deadline_s
        self._memory_bytes = memory_bytes() // max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
        """Bytes of the node's memory, shared evenly among its ranks."""
        self._planner = RecordPlanner(group, store, self.space, run=run, mesh=mesh)
        self._memory: RecordMemory | None = None
        self._copier = GradientCopier(options.most_device_bytes, tell)
        self._handover: Future[None] | None = None
        """The newest record on its way to the writer."""
        self.way = WayToStorage(self._copier, self._new_queue())

    @property
    def _queue(self) -> Queue:
        return self.way.queue

    @property
    def run(self) -> int:
        """The run that the records are of."""
        return self._planner.run

    @property
    def store(self) -> Store:
        """The store that takes the records."""
        return self._planner.store

    @property
    def error(self) -> HoldfastError | None:
        """Why nothing can be recorded any more."""
        return self.failure or self._queue.error

    @property
    def is_behind(self) -> bool:
        """True if records cannot begin anew without waiting for storage, which the user does not want."""
        return self._options.when_full == "drop" and not self._queue.is_empty

    # -- what records hold ------------------------------------------------------------------------

    @property
    def is_planned(self) -> bool:
        return self._memory is not None

    def unplan(self) -> None:
        """Drop the record under way and the plan; the next record needs another plan."""
        self.drop()
        self._memory = None

    def plan(
        self,
        optimizers: list[NamedOptimizer],
        groups: Groups,
        values: dict[str, torch.Tensor],
        extras: bytes,
    ) -> None:
        """Plan what records hold from now on, with room for such `extras`.  Collective; blocks."""
        self._make_memory(self._planner.plan(optimizers, groups, values, len(extras)))

    @property
    def most_batch(self) -> int:
        """The most records per file: what records' share of memory holds, or what the user asked for, if
        that is more."""
        record_bytes = self.space.record_bytes
        if not record_bytes:
            return self._options.batch
        room = self._memory_bytes // MEMORY_SHARE // record_bytes
        return max(room - self._options.queue, self._options.batch)

    def reopen(self) -> None:
        """Give the queue as much memory as batches need now.  Blocks while records are written."""
        if self._memory is not None and self._memory.batch != self.batch:
            self._make_memory(self._memory.plan)

    def rebatch(self, batch: int) -> None:
        """Write so many records per file from now on."""
        assert batch == self.batch or self.open is None, "a record is under way"
        self.batch = batch

    def _make_memory(self, plan: RecordPlan) -> None:
        """Make memory for records, and tell a writer of them.  Blocks while earlier ones are written."""
        plan.layout.forget_places()
        self._copier.forget()
        slots = replace(self._options, batch=self.batch).slots
        ring = Ring(slots, aligned(plan.layout.image.total_bytes))
        ring.locked = lock_pages(ring.view, devices_of(plan.layout.tensors_here))
        threading.Thread(target=ring.populate, name="holdfast-ring", daemon=True).start()
        self._queue.open(plan.header, ring, self.batch)
        self._memory = RecordMemory(plan, ring, self.batch)

    # -- one record -------------------------------------------------------------------------------

    def begin(self) -> OpenRecord | None:
        """Begin a record of the planned layout; None without a plan, without a free slot, or if the bound
        allows no more.  Blocks while the queue is full, and until the writer has the record before: so no
        more than one is lost with this process."""
        if not self.space.has_room:
            self.space.pause()
            return None
        waits = self._options.when_full == "wait"
        if self._memory is None or not self._has_handed_over(wait=waits):
            return None
        slot = self._queue.take(wait=waits)
        if slot is None:
            return None
        self.open = OpenRecord(slot, self._memory.ring.slot(slot), self._memory.plan.layout)
        return self.open

    def _has_handed_over(self, *, wait: bool) -> bool:
        """True if the writer has the record before.  Waits up to the deadline with `wait`, then Deadline;
        else briefly."""
        if self._handover is None or self._handover.done():
            return True
        limit_s = self._deadline_s if wait else HURRY_S
        with span("delta.hand_over"):
            done, _ = futures.wait([self._handover], limit_s)
        if wait and not done:
            raise Deadline(
                f"the writer took no record for {limit_s:g} s",
                hint="storage may hang; Delta(when_full='drop') does not wait for it",
            )
        return bool(done)

    def copy_gradients(self, record: OpenRecord, one: NamedOptimizer) -> None:
        """Begin to copy the gradients of one optimizer; they must stay as they are until `let_go`."""
        differs = any(group.get("differentiable") for group in one.optimizer.param_groups)
        read_only = is_torchs(one.optimizer) and not differs
        for name, p in one.params:
            check_grad(name, p, read_only=read_only)
        record.applied.append(_applied(one))
        self._copier.copy(record, one)

    def let_go(self) -> dict[str, list[str]]:
        """Let the training change gradients after this: wait for copies where necessary.

        Returns the names of gradients that are not as declared, by what they have.  Then the record must be
        dropped; the next plan records these gradients whole.
        """
        wrong: dict[str, list[str]] = {}
        if self.open is not None:
            self.open.let_go()
            for error in self.open.misdeclared:
                wrong[error.what] = list(dict.fromkeys([*wrong.get(error.what, ()), *error.names]))
                self._planner.record_whole(error.names, self.open.layout)
        return wrong

    def fill(self, record: OpenRecord, extras: bytes, values: dict[str, torch.Tensor]) -> str:
        """Begin to copy what the record holds besides gradients; return why it does not fit, empty if it
        does."""
        layout = record.layout
        if len(extras) > layout.image.extras_bytes:
            self._planner.make_room(len(extras))
            return f"extras have grown to {len(extras)} bytes"
        written = [(piece, values[piece.name]) for piece in layout.values if piece.name in values]
        if any((t.shape, t.dtype) != (p.tensor.shape, p.dtype) for p, t in written):
            return "a buffer has another shape or dtype"
        record.extras = extras
        targets = places(record.memory, (piece for piece, _ in written))
        placed = [(place, tensor) for place, (_, tensor) in zip(targets, written)]
        self._copier.copy_values(record, placed)
        record.let_go()
        return ""

    def hand_over(
        self,
        record: OpenRecord,
        step: int,
        parent: Identity,
        *,
        unchanged: tuple[str, ...],
        notes: dict[str, tuple[str, str]],
        late: tuple[str, ...] | None,
    ) -> Identity:
        """Have the complete record sent to the writer; return the state that it leads to.  Returns at
        once."""
        entry = Record(step, parent, 0, 0, 0, 0, tuple(record.applied), unchanged, notes, late)
        self.open = None
        self.recorded = True
        self.space.add(self.space.record_bytes)
        self._handover = self._copier.then(self._put, record, entry, self.space.leave_bytes)
        return self.run, step

    def _put(self, record: OpenRecord, entry: Record, leave_bytes: int) -> None:
        """Seal the record and put it into the queue, on the copying thread."""
        try:
            record.wait_copied()
            if record.misdeclared:
                raise record.misdeclared[0]
            image = record.layout.seal(record.memory, record.sizes, record.extras)
            entry = msgspec.structs.replace(
                entry, bytes=image.total_bytes, data=image.data_start, extras=image.extras_start,
                table=image.table_start, sizes=record.sizes,
            )  # fmt: skip
            self._queue.put(record.slot, entry, leave_bytes)
        except BaseException as error:
            emit("delta.failed", step=entry.step, error=str(error))
            self._queue.give_back(record.slot)
            self.failure = AgentError(f"the record of step {entry.step} is lost: {error}")

    def drop(self) -> None:
        """Drop the record under way."""
        record, self.open = self.open, None
        if record is not None:
            futures.wait([copying.done for copying in record.copying])  # they write to the slot
            self._queue.give_back(record.slot)

    # -- the way to storage -----------------------------------------------------------------------

    def handed_over(self, limit_s: float | None) -> None:
        """Wait until the writer has every record, which then outlives this process.  Deadline.  `limit_s`:
        None for the deadline of the group."""
        self.way.handed_over(self._deadline_s if limit_s is None else limit_s)

    def settle(self) -> None:
        """Drop the record under way, and wait until all others are in storage."""
        self.drop()
        self.way.flush(self._deadline_s)

    def revive(self) -> None:
        """Begin again after an error, with another writer if the former one gave up."""
        self.unplan()
        if self._queue.error is not None:
            self._queue.close(0.0)
            self.way.queue = self._new_queue()
        self.failure = None

    def adopt(self, run: int) -> None:
        """Go on as another run, with a new writer.  Blocks until the former one has written all records."""
        self._planner.run = run
        self.recorded = False
        self.unplan()
        self._queue.close(self._deadline_s)
        self.way.queue = self._new_queue()

    def _new_queue(self) -> Queue:
        return Queue(self.store, self._deadline_s, self.progress)

    def close(self, limit_s: float) -> None:
        """Drop the record under way, wait until the writer has the others, and end it."""
        until = time.monotonic() + limit_s
        with ExitStack() as last:
            last.callback(lambda: self._queue.close(max(until - time.monotonic(), LEAST_S)))
            last.callback(self._copier.shutdown)
            self.drop()
            self.handed_over(limit_s)


def _applied(one: NamedOptimizer) -> Applied:
    """The step that an optimizer is about to make."""
    inf, scale = (_number(getattr(one.optimizer, n, None)) for n in ("found_inf", "grad_scale"))
    hyper = tuple(encoded_hyper_parameters(one.key, g) for g in one.optimizer.param_groups)
    return Applied(one.key, hyper, missing_of(one), inf, scale, hooks_after(one.optimizer))


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
