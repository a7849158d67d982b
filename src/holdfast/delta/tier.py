"""The differential tier's side in a training process: hooks on the optimizers, and a record per step.

A record is made in two parts.  When an optimizer's step begins, its gradients are final, and only the
optimizer reads them until it ends: a thread copies them into the ring in that time.  At
`Checkpointer.step` follow the rest of what the step changed (buffers, extras), and the record goes to the
writer.  No rank waits for another, except when all plan together what their records hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch

from holdfast.capture import Save
from holdfast.codec.digest import hexdigest
from holdfast.delta.options import Delta
from holdfast.delta.queue import Queue
from holdfast.delta.recording import (
    SPARE_ROOM,
    Layout,
    Mark,
    agree,
    buffers,
    check_grad,
    copy,
    encode_extras,
    held,
    kind_of,
    missing_of,
    only_reads,
    optimizers,
    places,
    plan_of,
    small,
    untrained,
    watched,
)
from holdfast.delta.ring import Ring
from holdfast.delta.segment import Applied, Header, Identity, Record, aligned, put_plan
from holdfast.errors import AgentError, HoldfastError, UsageError
from holdfast.events import emit, span
from holdfast.group import Group
from holdfast.layout import Mesh
from holdfast.state.live import Live, State
from holdfast.state.rest import collect_rest, encoded_hyper
from holdfast.store import Store

MAX_EDITS = 3


@dataclass
class Open:
    """The record that is being made."""

    slot: int
    memory: memoryview
    applied: list[Applied] = field(default_factory=list)
    copying: list[Future[None]] = field(default_factory=list)


class DeltaTier:
    """Records of every step.  All ranks call its methods in the same order."""

    def __init__(
        self,
        state: Callable[[], State],
        group: Group,
        store: Store,
        options: Delta,
        *,
        run: int,
        mesh: Mesh | None,
        on_resize: dict[str, str],
        deadline_s: float,
    ) -> None:
        self.state = state
        self.group = group
        self.store = store
        self.options = options
        self.run = run
        self.mesh = mesh
        self.on_resize = on_resize
        self.parent: Identity | None = None
        """The state that the next record leads on from; None until there is one to begin with."""
        self.paused = False
        self._base: Save | None = None
        self._deadline_s = deadline_s
        self._queue = Queue(deadline_s)
        self._copier = ThreadPoolExecutor(1, "holdfast-delta")
        self._layout: Layout | None = None
        self._open: Open | None = None
        self._planned = 0
        self._room = 0
        """For extras, at least; they have grown before."""
        self._steps = optimizers(state())
        self._untrained: dict[str, torch.Tensor] = {}
        self._marks: dict[str, Mark] = {}
        """What no optimizer changes, as it was at the last record."""
        self._changing: set[str] = set()
        self._watched: list[torch.Tensor] = []
        self._written = 0
        self._edits = 0
        """Records in a row that could not be, because of weights that were written."""
        self._failure: HoldfastError | None = None
        self._rebatched = False
        self._header: Header | None = None
        self._begun = False
        self._bases = 0
        """How often ranks have agreed on a base that one of them needed."""
        self.recorded = False
        """Whether this run has made records."""
        self._hooks = []
        self._last = []
        """By optimizer, the hook that has to be the last one before its step."""
        for one in self._steps:
            before = one.optimizer.register_step_pre_hook(self._before(one.key))
            self._last.append((one.optimizer._optimizer_step_pre_hooks, before.id))
            self._hooks += [before, one.optimizer.register_step_post_hook(self._after)]

    # -- training thread --------------------------------------------------------------------------

    def needs_base(self, step: int) -> bool:
        """Whether all ranks make a full save of this step, for records to lead on from.

        One rank may need it alone: it says so, and all do it at the step after, when all have heard of it.
        """
        if self._base is not None and self._base.done():
            failed, self._base = self._base.error is not None or self._base.skipped, None
            if failed:
                self._break("the save that records lead on from failed")
        wanted = self.parent is None and self.error is None
        if self.group.size == 1 or not self._begun:
            return wanted
        key = f"delta/base/{self._bases}"
        if wanted:
            self.group.post_first(key, str(step + 1).encode())
        found = self.group.peek(key)
        if found is None or step < int(found):
            return False
        self._bases += 1
        self._drop_open()
        self._layout = None
        return True

    def begin_from(self, identity: Identity, base: Save | None = None) -> None:
        """The live state is this one, known or being saved; records lead on from it."""
        self._drop_open()
        self._begun = True
        self.parent, self._base = identity, base
        for hooks, number in self._last:
            hooks.move_to_end(number)
        state = self.state()
        self._untrained = untrained(state)
        self._mark(state)
        self._watched = watched(self._steps)
        self._written = self._writes()

    def revive(self) -> None:
        """Try again, after an error: from another base, for records are missing."""
        self._drop_open()
        self._break("an error")
        if self._queue.error is not None:
            self._queue.close(0.0)
            self._queue = Queue(self._deadline_s)
        self._failure = None
        self._layout = None

    def settle(self) -> None:
        """Nothing is on its way to storage any more, for all will be read."""
        self._drop_open()
        self._copier.submit(lambda: None).result(self._deadline_s)
        if self._queue.error is None:
            self._queue.flush(self._deadline_s)

    def end(self, why: str) -> None:
        """Record no more, until records begin from another base."""
        if self.parent is not None:
            self._drop_open()
            self._break(why)

    def rebatch(self, batch: int) -> None:
        """So many records per file from now on.  All ranks say so at the same step."""
        if batch != self.options.batch:
            assert self._open is None, "a record is under way"
            self.options = replace(self.options, batch=batch)
            self._rebatched = self._layout is not None

    def adopt(self, run: int) -> None:
        """Go on as another run, with a writer of its own.  Blocks until all is written."""
        self.run, self.recorded = run, False
        self._drop_open()
        self._queue.close(self._deadline_s)
        self._queue = Queue(self._deadline_s)
        self._layout = None

    @property
    def error(self) -> HoldfastError | None:
        """Why nothing is recorded any more, until records begin from another base."""
        if self._edits > MAX_EDITS:
            return UsageError(
                "weights are written outside optimizer.step() at every step, which no record can tell",
                hint="make such changes in the optimizer, or do without delta=",
            )
        return self._failure or self._queue.error

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Steps of optimizers in this block are no steps of the training."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    def _break(self, why: str) -> None:
        """Records end here."""
        emit("delta.broken", why=why)
        self.parent = None

    def _before(self, key: str) -> Callable[..., None]:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.parent is None or self.paused:
                return
            given = args[1:] or (kwargs.get("closure"),)  # torch hands over the optimizer, too
            closure = given[0]
            if closure is not None:
                raise UsageError(
                    "delta= cannot record an optimizer that is given a closure",
                    hint="call step() without one; LBFGS cannot be recorded",
                )
            try:
                self._begin(key)
            except UsageError:
                raise
            except (HoldfastError, OSError) as error:
                self._fail(error)

        return hook

    def _fail(self, error: HoldfastError | OSError) -> None:
        """Records end, and the training goes on."""
        if isinstance(error, OSError):
            error = AgentError(f"memory for records: {error.strerror or error}")
        self._failure = error
        self._again(error.message)

    def _begin(self, key: str) -> None:
        """The gradients are final: copy them while the optimizer reads them."""
        record = self._opened()
        if record is None:
            return
        one = next(one for one in self._steps if one.key == key)
        if any(next(reversed(hooks)) != number for hooks, number in self._last):
            self._again("a hook was registered that may change gradients after their copy")
            return
        if self._writes() != self._written:
            self._edited("between two steps")
            return
        if any(a.key == one.key for a in record.applied):
            raise UsageError(
                f"{one.key!r} has made two steps between two calls of Checkpointer.step()",
                hint="call it after each optimizer step",
            )
        for name, p in one.params:
            if p.grad is not None:
                check_grad(name, p)
        scale = [_number(getattr(one.optimizer, n, None)) for n in ("found_inf", "grad_scale")]
        hyper = tuple(encoded_hyper(one.key, g) for g in one.optimizer.param_groups)
        record.applied.append(Applied(one.key, hyper, missing_of(one), *scale))
        assert self._layout is not None
        places = self._layout.places(record.slot, record.memory, one.key)
        grads = [(p, p.piece.tensor.grad) for p in places if p.piece.tensor.grad is not None]
        ready = _event(grads[0][1].device) if grads else None
        record.copying.append(self._copier.submit(_copy, grads, ready))
        if not only_reads(one.optimizer):
            self._after()

    def _after(self, *_: Any) -> None:
        """The gradients may be changed as soon as they are copied."""
        if self._open is not None:
            for copying in self._open.copying:
                copying.result()
            self._written = self._writes()

    def _writes(self) -> int:
        """Grows with every write to a parameter."""
        return sum(tensor._version for tensor in self._watched)

    def _edited(self, when: str) -> None:
        """No record leads to weights that somebody else writes."""
        self._edits += 1
        self._again(f"weights were written outside optimizer.step(), {when}")

    def _opened(self) -> Open | None:
        """The record under way; a new one if there is none.  Blocks while the queue is full."""
        if self._open is not None:
            return self._open
        if self._failure is not None:
            self._break(self._failure.message)
            return None
        if self._layout is None or self._is_stale():
            self._plan()
        elif self._rebatched:
            self._open_queue()
        slot = self._queue.take(wait=self.options.when_full == "wait")
        if slot is None:
            error = self._queue.error
            self._break("storage is too slow" if error is None else error.message)
            return None
        assert self._queue.ring is not None
        self._open = Open(slot, self._queue.ring.slot(slot))
        return self._open

    def _is_stale(self) -> bool:
        """Whether an optimizer has other parameters than planned."""
        return any(
            [id(p) for g in one.optimizer.param_groups for p in g["params"]]
            != [id(p) for _, p in one.params]
            for one in self._steps
        )

    def _plan(self) -> None:
        """What records hold from now on.  Collective; blocks."""
        state = self.state()
        self._steps = optimizers(state)
        self._watched = watched(self._steps)
        self._written = self._writes()
        tensors = buffers(state)
        self._changing |= small(tensors)
        values = {n: t for n, t in {**self._untrained, **tensors}.items() if n in self._changing}
        live = held(self._steps, values)
        self._planned += 1
        agreement = agree(self.group, live, self.mesh, self._planned)
        plan = plan_of(agreement)
        name = hexdigest(msgspec.json.encode(plan))
        if self.group.rank == 0:
            put_plan(self.store, self.run, plan)
        extras = encode_extras(collect_rest(state, self._groups, self.on_resize).extras)
        room = aligned(max(self._room, len(extras) * 5 // 4 + SPARE_ROOM))
        self._layout = Layout.of(agreement, self.group.rank, live, self._steps, room)
        kinds = {one.key: kind_of(one.optimizer) for one in self._steps}
        self._header = Header(self.run, self.group.rank, self.group.size, name, self._groups, kinds)
        self._open_queue()

    def _open_queue(self) -> None:
        """Memory for records, and a writer that knows them.  Blocks while earlier ones are written."""
        assert self._layout is not None and self._header is not None
        self._layout.forget_places()
        ring = Ring(self.options.slots, aligned(self._layout.image.total_bytes))
        self._queue.open(self.store.url, self._header, ring, self.options.batch)
        self._rebatched = False

    @property
    def _groups(self) -> dict[str, tuple[tuple[str, ...], ...]]:
        return {
            one.key: tuple(tuple(name for name, _ in pairs) for pairs in one.groups)
            for one in self._steps
        }

    def record(self, step: int) -> None:
        """The step is over: what else it changed, and off the record goes.  Returns at once."""
        if self.parent is None:
            return
        with span("delta.call", step=step):
            state = self.state()
            rest = collect_rest(state, self._groups, self.on_resize)
            changed = self._changed(state)
            if self._writes() != self._written:
                self._edited("after it")
                return
            if not changed <= self._changing:  # such as the first step of a batch norm
                self._changing |= changed
                self._again("buffers change that did not before")
                return
            try:
                record = self._opened()
                if record is not None:
                    self._finish(record, step, rest, changed, state)
            except (HoldfastError, OSError) as error:
                self._fail(error)

    def _again(self, why: str) -> None:
        """This step's record cannot be: the next ones are planned anew, from a new base."""
        self._drop_open()
        self._layout = None
        self._break(why)

    def _finish(self, record: Open, step: int, rest: Live, changed: set[str], state: State) -> None:
        layout, parent = self._layout, self.parent
        assert layout is not None and parent is not None
        data = encode_extras(rest.extras)
        if len(data) > layout.image.extras_bytes:
            self._room = max(self._room, 2 * len(data))
            self._again(f"extras of {len(data)} bytes")
            return
        image = layout.image
        record.memory[: image.data_start] = image.header
        record.memory[image.extras_start : image.table_start] = data.ljust(image.extras_bytes)
        now = {**self._untrained, **buffers(state)}
        written = [
            (name, piece) for name, piece in layout.values if name in changed and name in now
        ]
        if any(now[name].shape != piece.tensor.shape for name, piece in written):
            self._again("a buffer has another shape")
            return
        values = places(record.memory, (piece for _, piece in written))
        copy([(value, now[name]) for value, (name, _) in zip(values, written)])
        notes = {
            k: (
                hexdigest(msgspec.json.encode([v, rest.contents.get(k, [])])),
                rest.rules.get(k, ""),
            )
            for k, v in rest.extras.items()
        }
        unchanged = tuple(sorted(self._changing - changed))
        entry = Record(
            step, parent, image.total_bytes, image.data_start, image.extras_start, image.table_start,
            tuple(record.applied), unchanged, notes,
        )  # fmt: skip
        self._open, self.parent = None, (self.run, step)
        self._edits = 0
        self.recorded = True
        for hooks, number in self._last:
            hooks.move_to_end(number)
        self._copier.submit(self._hand_over, record, entry)

    def _hand_over(self, record: Open, entry: Record) -> None:
        """On the copying thread, behind the copies."""
        try:
            for copying in record.copying:
                copying.result()
            self._queue.put(record.slot, entry)
        except BaseException as error:
            emit("delta.failed", step=entry.step, error=str(error))
            self._queue.give_back(record.slot)
            self._failure = AgentError(f"the record of step {entry.step} is lost: {error}")

    def _changed(self, state: State) -> set[str]:
        """Buffers that were written since the last record, as far as that can be known."""
        before = self._marks
        self._mark(state)
        found = {n for n, mark in self._marks.items() if n not in before or mark.differs(before[n])}
        return found | small(buffers(state))

    def _mark(self, state: State) -> None:
        tensors = {**self._untrained, **buffers(state)}
        self._marks = {name: Mark.of(t) for name, t in tensors.items()}

    def _drop_open(self) -> None:
        record, self._open = self._open, None
        if record is not None:
            for copying in record.copying:
                copying.result()
            self._queue.give_back(record.slot)

    def handed_over(self, limit_s: float | None) -> None:
        """Wait until every record is the writer's, and outlives this process.  TimeoutError."""
        self._copier.submit(lambda: None).result(limit_s)

    def close(self, limit_s: float) -> None:
        for hook in self._hooks:
            hook.remove()
        self._drop_open()
        try:
            self._copier.submit(lambda: None).result(limit_s)
        finally:
            self._copier.shutdown(wait=False)
            self._queue.close(limit_s)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _event(device: torch.device) -> torch.Event | None:
    """After all that the training thread's stream has been given; None on the CPU."""
    if device.type == "cpu":
        return None
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def _copy(grads: list[Any], ready: torch.Event | None) -> None:
    """On the copying thread.  Blocks until all are copied."""
    if ready is None:
        copy(grads)
        return
    device = grads[0][1].device
    stream = torch.Stream(device)
    stream.wait_event(ready)
    with torch.cuda.stream(stream) if device.type == "cuda" else stream:
        copy(grads)
    stream.synchronize()
