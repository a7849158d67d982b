"""The record under way: a slot of the ring, the copies into it, and its way to the writer.

Gradients on a device are copied by a thread while the optimizer reads them.  On the CPU they are copied
before its step: the threads of its kernels wait for one another, and a copy beside them, which takes a core
from one of them, would hold up all.  The caller copies what follows them (buffers, extras), and the thread
hands the record over, behind its copies.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch

from holdfast.checkpoint.peers import alike
from holdfast.codec.digest import hexdigest
from holdfast.delta.options import Delta
from holdfast.delta.packing import NotAsDeclared, Pack, parted
from holdfast.delta.places import RecordLayout, copy, places, spread
from holdfast.delta.queue import Queue
from holdfast.delta.recording import (
    SPARE_ROOM,
    Steps,
    agree,
    check_grad,
    held,
    is_torchs,
    kind_of,
    missing_of,
    plan_of,
)
from holdfast.delta.ring import Ring
from holdfast.delta.segment import (
    Applied,
    Identity,
    Record,
    SegmentHeader,
    aligned,
    encode_header,
    put_plan,
)
from holdfast.delta.space import Space, needed_bytes
from holdfast.errors import AgentError, Deadline, HoldfastError, UsageError
from holdfast.events import emit, span
from holdfast.format.image import ALIGN
from holdfast.group import Group
from holdfast.here import memory_bytes
from holdfast.layout import Mesh
from holdfast.patience import slowest
from holdfast.state.observer import hooks_after
from holdfast.state.rest import encoded_hyper
from holdfast.store import Store
from holdfast.threads import Worker

LEAST_S = 0.1
HURRY_S = 1.0
"""Seconds that a record gets to reach its writer, where storage is not waited for."""
MEMORY_SHARE = 16
"""Records may take one of so many parts of a rank's share of its node's memory, where batches are tuned."""

Groups = dict[str, tuple[tuple[str, ...], ...]]
"""The parameters' names, group by group, by optimizer's key."""


@dataclass
class OpenRecord:
    """The record that is being made."""

    slot: int
    memory: memoryview
    layout: RecordLayout
    applied: list[Applied] = field(default_factory=list)
    copying: list[Future[None]] = field(default_factory=list)
    extras: bytes = b""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of the sparse gradients that are packed, by name."""
    misdeclared: list[NotAsDeclared] = field(default_factory=list)
    """Gradients that prove to be other than was declared: the record must not be."""


@dataclass(frozen=True)
class RecordPlan:
    """The layout of all records from a plan on, and the memory for them."""

    layout: RecordLayout
    header: SegmentHeader
    ring: Ring


class RecordCapture:
    """Makes one record after the other, of one layout until another is planned."""

    def __init__(
        self,
        group: Group,
        store: Store,
        options: Delta,
        *,
        run: int,
        mesh: Mesh | None,
        deadline_s: float,
    ) -> None:
        self.open: OpenRecord | None = None
        self.failure: HoldfastError | None = None
        """Why a record could not be made, or did not reach the writer."""
        self.space = Space(options.bound, group.size)
        self.save_every: int | None = None
        """Steps between full saves, as far as that is known."""
        self.notice: HoldfastError | None = None
        """The error to be told to the user, once."""
        self._group = group
        self._store = store
        self._options = options
        self._asked_batch = options.batch
        self._run = run
        self._mesh = mesh
        self._deadline_s = deadline_s
        self._memory_bytes = memory_bytes() // max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
        """Bytes of the node's memory, shared evenly among its ranks."""
        self._queue = Queue(deadline_s)
        self._copier = Worker("holdfast-delta")
        self._beside = ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), "holdfast-copy")
        self._plan: RecordPlan | None = None
        self._plans = 0
        """Number of plans so far."""
        self._rebatched = False
        self._record_bytes = 0
        self._looked_for = 0
        """Room in storage is not looked for again for records of up to so many bytes."""
        self._room = 0
        """Bytes of room for extras, at least; they have grown before."""
        self._whole: set[str] = set()
        """Gradients that are recorded whole, whatever was declared of them."""
        self._handing: Future[None] | None = None
        """The newest record on its way to the writer."""
        self._streams: dict[torch.device, torch.Stream] = {}
        """Streams to copy from devices, one for each: a stream's memory is its own."""

    @property
    def error(self) -> HoldfastError | None:
        """Why nothing can be recorded any more."""
        return self.failure or self._queue.error

    @property
    def is_behind(self) -> bool:
        """True if to begin anew would mean to wait for storage, which was not wanted."""
        return self._options.when_full == "drop" and not self._queue.is_empty

    # -- what records hold ------------------------------------------------------------------------

    @property
    def is_planned(self) -> bool:
        return self._plan is not None

    def unplan(self) -> None:
        """Drop the record under way, and the plan; another plan is made before the next record."""
        self.drop()
        self._plan = None

    def plan(
        self, steps: list[Steps], groups: Groups, values: dict[str, torch.Tensor], extras: bytes
    ) -> None:
        """Plan what records hold from now on, with room for such `extras`.  Collective; blocks."""
        live = held(steps, values, self._whole)
        self._plans += 1
        together = agree(self._group, live, self._mesh, self._plans)
        agreement, few = parted(together, self._group.size)
        plan = plan_of(agreement, few)
        name = hexdigest(msgspec.json.encode(plan))
        if self._group.rank == 0:
            put_plan(self._store, self._run, plan)
        room = aligned(max(self._room, len(extras) * 5 // 4 + SPARE_ROOM))
        layout = RecordLayout.of(agreement, few, self._group.rank, live, steps, room)
        kinds = {one.key: kind_of(one.optimizer) for one in steps}
        modules = {one.key: one.modules for one in steps}
        header = SegmentHeader(
            self._run, self._group.rank, self._group.size, name, groups, kinds, modules=modules
        )
        self._check_space(layout.image.total_bytes, len(encode_header(header)))
        self._open_queue(layout, header)

    def _check_space(self, image_bytes: int, header_bytes: int) -> None:
        """Check for room before anything is recorded.  Collective if there is a bound."""
        self._record_bytes = aligned(image_bytes) + header_bytes + ALIGN
        if self.space.max_bytes:
            if self._plans == 1:
                there = self._group.from_rank0(lambda: str(needed_bytes(self._store)).encode())
                self.space.add(int(there) // self._group.size)
            try:
                with alike(self._group, 0):
                    self.space.check(self._record_bytes)
            except UsageError as error:
                if self._plans == 1:
                    raise
                raise AgentError(error.message, hint=error.hint) from None  # training goes on
        if self._group.rank == 0 and self._record_bytes > self._looked_for:
            self._looked_for = self._record_bytes * 5 // 4
            lacking = self.space.lacking(self._store, self._record_bytes, self.save_every)
            self.notice = lacking or self.notice

    @property
    def batch(self) -> int:
        """Records per file."""
        return self._options.batch

    @property
    def most_batch(self) -> int:
        """The most records per file: what a sixteenth of this rank's share of the node's memory holds, or
        what the user asked for, if that is more."""
        asked = self._options.queue + self._asked_batch
        room = self._memory_bytes // MEMORY_SHARE // max(self._record_bytes, 1)
        return max(room, asked) - self._options.queue if self._record_bytes else self._asked_batch

    def reopen(self) -> None:
        """Give the queue as much memory as batches need now.  Blocks while records are written."""
        if self._rebatched and self._plan is not None:
            self._open_queue(self._plan.layout, self._plan.header)

    def rebatch(self, batch: int) -> None:
        """Write so many records per file from now on."""
        if batch != self._options.batch:
            assert self.open is None, "a record is under way"
            self._options = replace(self._options, batch=batch)
            self._rebatched = self.is_planned

    def _open_queue(self, layout: RecordLayout, header: SegmentHeader) -> None:
        """Make memory for records, and tell a writer of them.  Blocks while earlier ones are written."""
        layout.forget_places()
        ring = Ring(self._options.slots, aligned(layout.image.total_bytes))
        threading.Thread(target=ring.populate, name="holdfast-ring", daemon=True).start()
        self._queue.open(self._store, header, ring, self._options.batch)
        self._plan = RecordPlan(layout, header, ring)
        self._rebatched = False

    # -- one record -------------------------------------------------------------------------------

    def begin(self) -> OpenRecord | None:
        """Begin a record of the planned layout; None without a plan, if no slot can be had, or if storage
        may take no more.  Blocks while the queue is full, and until the writer has the record before: no
        more than one is lost with this process."""
        if not self.space.has_room(self._record_bytes):
            self.notice = self.space.pause()
            return None
        waits = self._options.when_full == "wait"
        slot = self._queue.take(wait=waits) if self._has_handed_over(wait=waits) else None
        if self._plan is None or slot is None:
            return None
        self.open = OpenRecord(slot, self._plan.ring.slot(slot), self._plan.layout)
        return self.open

    def _has_handed_over(self, *, wait: bool) -> bool:
        """True if the writer has the record before.  Deadline if it has not, though there was a `wait`."""
        if self._handing is None or self._handing.done():
            return True
        limit_s = self._deadline_s if wait else HURRY_S
        with span("delta.hand_over"):
            done, _ = futures.wait([self._handing], limit_s)
        if wait and not done:
            raise Deadline(
                f"the writer took no record for {limit_s:g} s",
                hint="storage may hang; Delta(when_full='drop') does not wait for it",
            )
        return bool(done)

    def gradients(self, record: OpenRecord, one: Steps) -> None:
        """Begin to copy the gradients of one optimizer; they must stay as they are until
        `wait_copied`."""
        differs = any(group.get("differentiable") for group in one.optimizer.param_groups)
        read_only = is_torchs(one.optimizer) and not differs
        for name, p in one.params:
            check_grad(name, p, read_only=read_only)
        record.applied.append(_applied(one))
        found = record.layout.places(record.slot, record.memory, one.key)
        grads = [(p, p.piece.tensor.grad) for p in found if p.piece.tensor.grad is not None]
        given = [p.grad for _, p in one.params if p.grad is not None]
        ready = _event(given[0].device) if given else None
        pack = record.layout.packs.get(one.key)
        if ready is None:
            self._copy_here(record, grads)
            _pack(record, pack, self._beside.map if torch.get_num_threads() > 1 else map)
            return
        if ready.device not in self._streams:
            self._streams[ready.device] = torch.Stream(ready.device)
        stream = self._streams[ready.device]
        record.copying.append(self._copier.submit(_copy, grads, ready, stream, record, pack))

    def _copy_here(self, record: OpenRecord, grads: list[Any]) -> None:
        """Copy with as many threads as the optimizer's kernels have."""
        parts = spread(grads, torch.get_num_threads())
        others = [self._beside.submit(_copy_part, record, part) for part in parts[1:]]
        for part in parts[:1]:
            _copy_part(record, part)
        for other in others:
            other.result()

    def wait_copied(self) -> dict[str, list[str]]:
        """Wait for the copies; gradients may be changed after this.  Return those that are not as
        declared, by what they have: the record cannot be, and the next plan has such gradients
        whole."""
        found: dict[str, list[str]] = {}
        if self.open is None:
            return found
        for copying in self.open.copying:
            copying.result()
        rounded = self.open.layout.rounded
        for error in self.open.misdeclared:
            found[error.what] = list(dict.fromkeys([*found.get(error.what, ()), *error.names]))
            self._whole |= set(error.names)
            if rounded & set(error.names):  # what computes with one of them does with the others
                self._whole |= rounded
        return found

    def fill(self, record: OpenRecord, extras: bytes, values: dict[str, torch.Tensor]) -> str:
        """Copy what the record holds besides gradients; return why it cannot, empty if it can."""
        layout = record.layout
        if len(extras) > layout.image.extras_bytes:
            self._room = max(self._room, 2 * len(extras))
            return f"extras of {len(extras)} bytes"
        written = [(piece, values[piece.name]) for piece in layout.values if piece.name in values]
        if any((t.shape, t.dtype) != (p.tensor.shape, p.dtype) for p, t in written):
            return "a buffer has another shape or dtype"
        record.extras = extras
        found = places(record.memory, (piece for piece, _ in written))
        copy([(place, tensor) for place, (_, tensor) in zip(found, written)])
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
        """Send the complete record to the writer; return the state that it leads to, at once."""
        entry = Record(step, parent, 0, 0, 0, 0, tuple(record.applied), unchanged, notes, late)
        self.open = None
        self.space.add(self._record_bytes)
        self._handing = self._copier.submit(self._put, record, entry)
        return self._run, step

    def _put(self, record: OpenRecord, entry: Record) -> None:
        """Seal the record and put it into the queue: on the copying thread, behind the copies."""
        try:
            for copying in record.copying:
                copying.result()
            if record.misdeclared:
                raise record.misdeclared[0]
            image = record.layout.seal(record.memory, record.sizes, record.extras)
            entry = msgspec.structs.replace(
                entry, bytes=image.total_bytes, data=image.data_start, extras=image.extras_start,
                table=image.table_start, sizes=record.sizes,
            )  # fmt: skip
            self._queue.put(record.slot, entry)
        except BaseException as error:
            emit("delta.failed", step=entry.step, error=str(error))
            self._queue.give_back(record.slot)
            self.failure = AgentError(f"the record of step {entry.step} is lost: {error}")

    def drop(self) -> None:
        """Drop the record under way."""
        record, self.open = self.open, None
        if record is not None:
            for copying in record.copying:
                copying.result()
            self._queue.give_back(record.slot)

    # -- the way to storage -----------------------------------------------------------------------

    def handed_over(self, limit_s: float | None) -> None:
        """Wait until the writer has every record, which then outlives this process: `deadline_s`
        unless told otherwise.  Deadline."""
        limit_s = self._deadline_s if limit_s is None else limit_s
        try:
            self._copier.settle(limit_s)
        except TimeoutError:
            raise Deadline(
                "records were not all with their writer when the time to wait for them was over",
                hint=slowest() or "the process that writes records does not take them",
            ) from None

    def settle(self) -> None:
        """Wait until nothing is on its way to storage any more."""
        self.drop()
        until = time.monotonic() + self._deadline_s
        self.handed_over(self._deadline_s)
        if self._queue.error is None:
            self._queue.flush(max(until - time.monotonic(), LEAST_S))

    def revive(self) -> None:
        """Try again after an error, with another writer if that one gave up."""
        self.unplan()
        if self._queue.error is not None:
            self._queue.close(0.0)
            self._queue = Queue(self._deadline_s)
        self.failure = None

    def adopt(self, run: int) -> None:
        """Go on as another run, with a writer of its own.  Blocks until all is written."""
        self._run = run
        self.unplan()
        self._queue.close(self._deadline_s)
        self._queue = Queue(self._deadline_s)

    def close(self, limit_s: float) -> None:
        self.drop()
        until = time.monotonic() + limit_s
        try:
            self.handed_over(limit_s)
        finally:
            self._copier.shutdown()
            self._beside.shutdown(wait=False)
            self._queue.close(max(until - time.monotonic(), LEAST_S))


def _applied(one: Steps) -> Applied:
    """The step that an optimizer is about to make."""
    inf, scale = (_number(getattr(one.optimizer, n, None)) for n in ("found_inf", "grad_scale"))
    hyper = tuple(encoded_hyper(one.key, g) for g in one.optimizer.param_groups)
    return Applied(one.key, hyper, missing_of(one), inf, scale, hooks_after(one.optimizer))


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _event(device: torch.device) -> torch.Event | None:
    """An event after all that the training thread's stream has been given; None on the CPU."""
    if device.type == "cpu":
        return None
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def _copy(
    grads: list[Any],
    ready: torch.Event,
    stream: torch.Stream,
    record: OpenRecord,
    pack: tuple[Pack, int] | None,
) -> None:
    """Copy on the copying thread.  Blocks until all are copied, and what is sparse is packed."""
    stream.wait_event(ready)
    with torch.cuda.stream(stream) if ready.device.type == "cuda" else stream:
        _copy_part(record, grads)
        _pack(record, pack, map)
    stream.synchronize()


def _copy_part(record: OpenRecord, grads: list[Any]) -> None:
    with _declared(record):
        copy(grads)


def _pack(
    record: OpenRecord, pack: tuple[Pack, int] | None, each: Callable[..., Iterable[Any]]
) -> None:
    """Pack an optimizer's sparse gradients, if any.  `each`: a `map`, over threads or not."""
    if pack is None:
        return
    with _declared(record):
        record.sizes[pack[0].name] = pack[0].into(record.memory[pack[1] :], each)


@contextmanager
def _declared(record: OpenRecord) -> Iterator[None]:
    """Keep errors of gradients that are not as declared, to be told when all is copied."""
    try:
        yield
    except NotAsDeclared as error:
        record.misdeclared.append(error)
