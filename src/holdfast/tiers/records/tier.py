"""The differential tier in a training process: it observes the optimizers, and makes a record per step.

A record is made in two parts.  When an optimizer's step begins, its gradients are final, and only the
optimizer reads them until it ends: in that time they are copied into the ring.  At `Checkpointer.step` the
other values that the step changed (buffers, extras) are added, and the record goes to the writer.  Ranks
wait for each other only when they plan together what their records hold.

This module decides when a record is made, and from which state it leads on.  `optimizers` observes steps,
`capture` makes the record, `watching` finds writes that no record holds, and `bases` knows the full saves
that records begin with.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch.optim import Optimizer

from holdfast.base.errors import AgentError, HoldfastError, UsageError
from holdfast.base.events import emit, span
from holdfast.base.notices import Notices
from holdfast.base.storage_deadlines import within
from holdfast.base.text import listed
from holdfast.core.group import Group
from holdfast.core.layout import Box, Mesh
from holdfast.core.store import MemoryStore
from holdfast.live.collecting import collect_step
from holdfast.live.every import Every
from holdfast.live.restore.targets import RestoreOptions
from holdfast.live.saving import Save
from holdfast.live.saving.handle import error_text
from holdfast.live.saving.messages import digests
from holdfast.live.saving.progress import TierStatus
from holdfast.live.saving.steps import RootSteps
from holdfast.live.shelves import Shelf
from holdfast.live.state.customised import asked_once
from holdfast.live.state.gradient_copies import only_reads
from holdfast.live.state.named import Collected
from holdfast.live.state.observer import StepCall
from holdfast.live.state.recognising import State
from holdfast.live.tier import Reached, Tier
from holdfast.tiers.records.bases import Bases, Unrecorded
from holdfast.tiers.records.capture import RecordCapture, WayToStorage
from holdfast.tiers.records.clock import Clock, Spent
from holdfast.tiers.records.copying import OpenRecord
from holdfast.tiers.records.log import Log, RecordedStep
from holdfast.tiers.records.optimizers import (
    GRAD,
    ObservedOptimizers,
    differently_strided,
    may_read_others,
    reduce_gradients,
    refused,
)
from holdfast.tiers.records.options import Delta
from holdfast.tiers.records.planning import encode_extras
from holdfast.tiers.records.replay import Replay
from holdfast.tiers.records.segment import Identity
from holdfast.tiers.records.trail import RecordTrail
from holdfast.tiers.records.watching import Watch

NO_RECORDS = (
    "records are switched on (delta=) and none is made: every=Every(delta=1) records every step"
)
LEAST_S = 0.1
"""Seconds that tidying up may take, however late it is."""
MAX_EDITS = 3
"""Steps in a row with writes outside of optimizers' steps, or with other optimizers, after which records
end with an error."""
WRITTEN = "weights or states of optimizers are written outside optimizer.step()"
REPLACED = "optimizers of the state are replaced"
FAILED = "the step of an optimizer failed"
MAX_IDLE = 20
"""Records in a row without the step of any optimizer, before the user is told."""

Parts = dict[str, tuple[tuple[int, ...], Box, str]]
"""Shape, box and dtype of this rank's parts of tensors, by name."""


class IdleRecords:
    """Counts records in a row without the step of an optimizer.  A graph of a device that holds the whole
    step, say, calls no hooks, and its writes are not seen."""

    def __init__(self) -> None:
        self._count = 0
        self._is_told = False

    def add(self, *, is_idle: bool) -> str:
        """Count a record; return a message for the user when many in a row are idle, once; else empty."""
        self._count = self._count + 1 if is_idle else 0
        if self._count != MAX_IDLE or self._is_told:
            return ""
        self._is_told = True
        return (
            f"{MAX_IDLE} steps without a step of an optimizer of the state: records lack the steps of an "
            "optimizer that is not in the state, or that makes them in a graph of a device"
        )


class DeltaTier(Tier):
    """Records of every step.  All ranks call its methods in the same order."""

    name = "delta"
    follows_steps = True

    def __init__(
        self,
        state: Callable[[], State],
        group: Group,
        root: RootSteps,
        options: Delta,
        notices: Notices,
        *,
        run: int,
        mesh: Mesh | None,
        on_resize: dict[str, str],
        is_tuned: bool,
    ) -> None:
        """`root`: the steps beside which records lie.  `is_tuned`: frequencies follow measurements, and
        records may be off."""
        store = root.store
        if isinstance(store, MemoryStore):
            raise UsageError(
                f"delta= cannot write to {store.url}: it is in this process's memory, and another process "
                "writes records",
                hint="give a path, such as one in /dev/shm",
            )
        self.state = state
        self.group = group
        self.on_resize = on_resize
        self._root = root
        self._notices = notices
        self._may_be_off = is_tuned
        """True if the user need not be warned that no records are made."""
        self._base_due: int | None = None
        """The step of which a full save is due, for records to lead on from."""
        self.parent: Identity | None = None
        """The state that the next record leads on from; None until there is one."""
        self.news: list[str] = []
        """Messages for the user."""
        self._capture = RecordCapture(
            group, store, options, run=run, mesh=mesh, deadline_s=group.deadline_s, tell=self._tell
        )
        self.progress = self._capture.progress
        self._watch = Watch()
        self._parts: Parts = {}
        """This rank's parts of objects' sharded tensors, as planned."""
        self._bases = Bases(group)
        self._unrecorded = Unrecorded()
        self._edits: list[str] = []
        """Why steps in a row have no record: something else wrote to weights or states, or replaced the
        optimizers."""
        self._idle = IdleRecords()
        self._clock = Clock()
        self._optimizers = ObservedOptimizers(state(), self._before_step, self._after_step)

    def complete(self) -> None:
        """Observe the optimizers, if the state was empty when this was made."""
        self._optimizers.complete(self.state())

    # -- a step of the session --------------------------------------------------------------------

    def act(self, step: int, every: Every) -> bool:
        """Make a record.  True if records need a full save to lead on from."""
        if every.delta is None:
            if not self._may_be_off:
                self._notices.warn(NO_RECORDS)
            self._may_be_off = True
            self.end("no records are due")
            return False
        self._may_be_off = True
        self.record(step, every.durable)
        self._tell_of_records()
        if self.error is not None and every.durable is not None and step % every.durable == 0:
            self.revive()
        self._base_due = step if self.needs_base(step) else None
        return self._base_due is not None

    def _tell_of_records(self) -> None:
        """Warn of what was noticed at this step, before its call ends."""
        while self.news:
            self._notices.warn(self.news.pop(0))
        if (notice := self.notice()) is not None:
            self._notices.complain(notice)
        failed = self.error
        if failed is not None:
            failed.hint = failed.hint or "records begin again with the next full save"
        self._notices.complain_once(failed, f"records end: {failed}")

    # -- what records lead on from ----------------------------------------------------------------

    def needs_base(self, step: int) -> bool:
        """True if all ranks make a full save of this step, for records to lead on from."""
        if self._bases.has_failed():
            self._break("the save that records lead on from failed")
        space = self._capture.space
        begins = self.parent is None and not self._capture.is_behind and not space.is_paused
        wanted = self.error is None and (begins or space.is_due)
        is_due = self._bases.is_due(step, wanted=wanted)
        if is_due and self.group.size > 1:
            self._capture.unplan()
        return is_due

    def saving(self, save: Save) -> None:
        """Note that a full save to storage has begun.  Records lead on from it if it was made for that, or
        has the number of the state that they would lead on from."""
        state = self._capture.run, save.step
        self._capture.space.saving(save)
        self._unrecorded.saved(save.step)
        self._bases.saved(state, self._optimizers.num_begun)
        replaces = self.parent is not None and self.parent[1] == save.step
        if self._base_due == save.step:
            self._base_due = None
            self.begin_from(state, save)
            self.ready()
        elif replaces and self.parent != state:
            self.begin_from(state, save)

    def status(self) -> TierStatus:
        """Records that are under way outlive this process as soon as their writer has them."""
        failed = self.error
        last = self._capture.progress.status
        return last if failed is None else replace(last, error=error_text(failed))

    def unheard(self) -> list[str]:
        failed, loss = self.error, self._loss()
        news = [loss] if loss else []
        return news if self._notices.was_told(failed) else [*news, f"records end: {failed}"]

    def _loss(self) -> str:
        """Say which steps are lost if the run ends now: those in no record, with no full save since.  Empty
        if there are none, or if the user has been told that records end."""
        return "" if self.error is not None else self._unrecorded.text()

    def notice(self) -> HoldfastError | None:
        """The error to tell the user now, if any; each is returned once."""
        space = self._capture.space
        notice, space.notice = space.notice, None
        return notice

    def begin_from(
        self, identity: Identity, base: Save | None = None, *, save_bytes: int = 0
    ) -> None:
        """Begin records that lead on from the live state, which is `identity`.  `base`: the full save of it
        that is under way, if any.  `save_bytes`: bytes of a full save, if known."""
        self._capture.space.save_bytes = save_bytes or self._capture.space.save_bytes
        self._capture.drop()
        if self._optimizers.follow(self.state()) or self._optimizers.is_stale:
            self._capture.unplan()
        self._unrecorded.forget()
        self._bases.begin(base)
        self.parent = identity
        self._optimizers.observer.forget_failed()
        self._optimizers.observer.come_last()
        self._watch.begin(self.state())

    def go_on(self, reached: Reached, every: Every) -> bool:
        if reached.state is None or every.delta is None:
            return False
        if not reached.is_complete():
            self.end("the restored step has not all of the live state")
            return False
        self.begin_from(reached.state, save_bytes=reached.save_bytes)
        return True

    def ready(self) -> None:
        """Plan records, right after `begin_from`.  Collective; blocks.

        In the first step of an optimizer it would be too late: a loss scaler may skip that step on one rank
        alone, or one rank's records may have failed.  The others would wait for that rank to plan, and it
        for them in the training's next exchange.
        """
        if self.group.size == 1 or self._capture.is_planned:
            return
        try:
            with self._clock.held(), self._clock.occasional():
                self._plan()
        except UsageError:
            raise
        except Exception as error:
            self._fail(error)

    def expect(self, names: set[str]) -> None:
        """Have records hold these buffers and untrained tensors from the first on: earlier steps changed
        them."""
        self._watch.learn(names, self.state())

    def end(self, why: str) -> None:
        """Record no more, until records begin from another base."""
        self._unrecorded.forget()
        if self.parent is not None:
            self._capture.drop()
            self._break(why)

    def revive(self) -> None:
        """Try again after an error, from another base, as records are missing."""
        self._capture.revive()
        self._break("an error")

    def announce(self, run: int) -> None:
        """Go on as `run`, with a new writer.  Blocks until the former one has written all records."""
        self._capture.adopt(run)

    def has_moved_on(self) -> bool:
        return self._capture.recorded

    @property
    def error(self) -> HoldfastError | None:
        """Why nothing is recorded any more, until records begin from another base."""
        if len(self._edits) > MAX_EDITS:
            return UsageError(
                f"{self._edits[-1]} at every step, which no record can hold",
                hint="make such changes in the optimizer, or do without delta=",
            )
        return self._capture.error

    def _break(self, why: str) -> None:
        """End the records, until they begin from another base."""
        emit("delta.broken", why=why)
        self.parent, self._unrecorded.why = None, why

    def _replan(self, why: str) -> None:
        """Drop this step's record and end the records; the next ones are planned anew, from a new base."""
        self._capture.unplan()
        self._break(why)

    def _end_at_write(self, when: str) -> None:
        """End the records, as something other than the optimizers has written to weights or states."""
        self._edits.append(WRITTEN)
        self._replan(
            "weights or states of an optimizer were written outside optimizer.step(), or replaced, "
            + when
        )

    def _fail(self, error: Exception) -> None:
        """End the records by an error; the training goes on."""
        if isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.ENOSPC):
            error = AgentError(f"no memory for records: {error.strerror}")
        elif not isinstance(error, HoldfastError):
            error = AgentError(f"a record could not be made: {type(error).__name__}: {error}")
        self._capture.failure = error
        self._replan(error.message)

    # -- restoring --------------------------------------------------------------------------------

    def trail(self, shelves: Sequence[Shelf]) -> RecordTrail:
        """Read the headers of the records after these steps.  Collective; Deadline."""
        return RecordTrail(self, shelves, self._capture.store, self._capture.run)

    def replay(
        self, log: Log, steps: list[RecordedStep], state: State, options: RestoreOptions
    ) -> RecordedStep | None:
        """Repeat recorded steps from the live state, which they lead on from; return the last one that was
        sound, None if none was.  Collective."""
        changed = {t.name for t in log.plan(steps[-1]).tensors if t.state == "buffer"}
        self.expect(changed)
        with self._optimizers.pause():
            return Replay(log, self.group, state, options).run(steps)

    # -- an optimizer's step ----------------------------------------------------------------------

    def _before_step(self, call: StepCall[str]) -> None:
        if call.around == call.name:  # a class calls its parent's step
            return
        params = (p for group in call.optimizer.param_groups for p in group["params"])
        reduce_gradients(params)  # collective, so also on ranks that make no records now
        if self.parent is None:
            return
        if call.around is not None:
            raise UsageError(
                f"delta= cannot record {call.around!r}, whose step makes that of {call.name!r}",
                hint="use memory= and durable saves alone, or optimizers that are stepped one by one",
            )
        if call.given:
            raise refused(call.name, call.given)
        try:
            with self._clock.held():
                self._copy_gradients(call.name, call.again)
        except UsageError:
            raise
        except Exception as error:
            self._fail(error)

    def _copy_gradients(self, key: str, again: bool) -> None:
        """Begin to copy an optimizer's gradients, which are final.  `again`: its step before failed."""
        record = self._open_record()
        if record is None:
            return
        if not self._optimizers.observer.is_last(key):
            self._replan("a hook was registered that may change gradients after their copy")
            return
        one = self._optimizers[key]
        # a step that may read other weights has all of them checked: after it, writes to all are accepted
        sees_all = not record.applied or may_read_others(one.optimizer)
        if self._watch.is_edited(None if sees_all else key):
            self._end_at_write("between two steps")
            return
        if again:
            self._replan(FAILED)
            return
        if any(a.key == key for a in record.applied):
            raise UsageError(
                f"{key!r} has made two steps between two calls of Checkpointer.step()",
                hint="call it after each optimizer step",
            )
        if name := differently_strided(one):
            self._fail(
                UsageError(
                    f"{key}: the gradient of {name} has other strides than the parameter: then torch "
                    f"{torch.__version__} rounds differently in 16 bits, and its fused optimizers pair "
                    "elements that do not belong together",
                    hint="make the parameter and its gradient contiguous",
                )
            )
            return
        if record.early is None and may_read_others(one.optimizer):
            record.early = self._watch.versions(self.state())
        self._capture.copy_gradients(record, one)
        if not only_reads(one.optimizer):
            self._release_gradients(key, one.optimizer)

    def _after_step(self, call: StepCall[str]) -> None:
        with self._clock.held():
            self._release_gradients(call.name, call.optimizer)

    def _release_gradients(self, key: str, optimizer: Optimizer) -> None:
        """Let the training change an optimizer's gradients once they are copied, and accept what its step
        and hooks may have written."""
        if self._capture.open is not None:
            misdeclared = self._capture.let_go()
            self._watch.accept_writes(None if may_read_others(optimizer) else key)
            for what, names in misdeclared.items():
                self._tell_misdeclared(names, what)
            if misdeclared:
                self._replan("gradients that are not as declared")

    def _tell(self, text: str) -> None:
        self.news += [text] if text else []

    def _tell_misdeclared(self, names: list[str], what: str) -> None:
        few = listed(name.removesuffix(f".{GRAD}") for name in names)
        self.news.append(
            f"gradients of {few} have {what}: something changes them after their compression; "
            "they are recorded whole from now on"
        )

    def _open_record(self) -> OpenRecord | None:
        """The record under way; a new one if there is none.  Blocks while the queue is full."""
        if self._capture.open is not None:
            return self._capture.open
        if self._capture.failure is not None:
            self._break(self._capture.failure.message)
            return None
        with self._clock.occasional():
            if not self._capture.is_planned:
                self._plan()
            self._capture.reopen()
        record = self._capture.begin()
        if record is None:
            error = self._capture.error
            slow = (
                "storage is too slow"
                if self._capture.space.notice is None
                else "the log is at its bound"
            )
            self._break(slow if error is None else error.message)
        return record

    def _plan(self) -> None:
        """Plan what records hold from now on.  Collective; blocks."""
        state = self.state()
        self._optimizers.rename(state)
        named, groups = self._optimizers.named, self._optimizers.groups
        values = self._watch.expect(state)
        rest = collect_step(state, groups, self.on_resize)
        objects = self._object_tensors(rest, state)
        self._parts = _parts_of(rest, objects)
        values |= objects
        self._capture.plan(named, groups, values, encode_extras(rest.extras))

    def _object_tensors(self, rest: Collected, state: State) -> dict[str, torch.Tensor]:
        """Sharded tensors in the state of objects, which every record holds whole."""
        known = self._watch.tensors(state)
        return {name: t.source for name, t in rest.tensors.items() if name not in known}

    # -- a step of the training -------------------------------------------------------------------

    def record(self, step: int, save_every: int | None = None) -> None:
        """Add the other values that the finished step changed, and send the record to the writer.  Returns
        at once.

        `save_every`: steps between full saves, if known.
        """
        self._capture.space.save_every = save_every
        parent = self.parent
        if parent is not None and step <= parent[1]:
            self._check_number(step, parent[1])
            return
        self._unrecorded.add(step)
        self._check_saved(step)
        if parent is None:
            return
        if self._optimizers.observer.forget_failed():
            self._replan(FAILED)
            return
        if self._optimizers.follow(self.state()):
            self._edits.append(REPLACED)
            self._replan("the state has other optimizers")
            return
        with self._clock.held(), span("delta.call", step=step), asked_once():
            state = self.state()
            rest = collect_step(state, self._optimizers.groups, self.on_resize)
            changed = self._watch.changed(state)
            if self._watch.is_edited():
                self._end_at_write("after it")
                return
            if not changed <= self._watch.changing:  # such as the first step of a batch norm
                self._watch.changing |= changed
                self._replan("buffers change that did not before")
                return
            try:
                record = self._open_record()
                if record is not None:
                    self._finish(record, step, parent, rest=rest, changed=changed, state=state)
            except Exception as error:
                self._fail(error)

    def check_save(self, step: int) -> None:
        """Raise UsageError if a full save under this number would be of another state than its records."""
        before = -1 if self.parent is None else self.parent[1]
        if step < before:
            raise UsageError(
                f"step {step} comes before step {before}, and records lead on from step {step}: from "
                "another state they would lead elsewhere",
                hint="save under the number of the step that was made",
            )
        if step == before and self._capture.open is not None:
            raise UsageError(
                f"step {step} was recorded, and an optimizer has made a step since: this is another state, "
                "from which records would lead elsewhere",
                hint="save before the next optimizer step, or under its number",
            )

    def _check_number(self, step: int, before: int) -> None:
        """Raise UsageError if an optimizer has made a step whose number is not above the last one."""
        if self._capture.open is not None:
            self._capture.drop()
            raise UsageError(
                f"step {step} comes after step {before}: numbers of recorded steps must grow",
                hint="call Checkpointer.step() once after each optimizer step, with its number",
            )

    def _check_saved(self, step: int) -> None:
        """Raise UsageError if a full save of this step was made before an optimizer's step that is part of
        it."""
        identity = self._capture.run, step
        if self._bases.is_of_another_state(identity, self._optimizers.num_begun):
            self._replan(f"step {step} was saved before it was made")
            raise UsageError(
                f"step {step} was saved before an optimizer made it: from that state records would lead "
                "elsewhere",
                hint="save under the number of the last step that was made",
            )

    def _finish(
        self,
        record: OpenRecord,
        step: int,
        parent: Identity,
        *,
        rest: Collected,
        changed: set[str],
        state: State,
    ) -> None:
        """Complete a record, which leads on from `parent`, and hand it over."""
        planned = self._watch.changing  # other ranks may have changed what this one has not
        values = {n: t for n, t in self._watch.tensors(state).items() if n in planned}
        objects = self._object_tensors(rest, state)
        values |= objects
        if _parts_of(rest, objects) != self._parts:
            self._replan("the state of an object has other tensors")
            return
        misfit = self._capture.fill(record, encode_extras(rest.extras), values)
        if misfit:
            self._replan(misfit)
            return
        if news := self._idle.add(is_idle=not record.applied):
            self.news.append(news)
        unchanged = tuple(sorted(self._watch.changing - changed))
        late = None if record.early is None else self._watch.written_since(record.early, state)
        self.parent = self._capture.hand_over(
            record, step, parent, unchanged=unchanged, notes=digests(rest), late=late
        )
        self._unrecorded.forget()
        self._edits = []
        self._clock.note_record()
        self._optimizers.observer.come_last()

    def spent(self) -> Spent:
        """The time for which the training thread was held since the last call."""
        return self._clock.take()

    @property
    def batch(self) -> int:
        """Records per file."""
        return self._capture.batch

    @property
    def most_batch(self) -> int:
        """The most records per file that memory holds."""
        return self._capture.most_batch

    def rebatch(self, batch: int) -> None:
        """Write so many records per file from now on.  All ranks call it at the same step."""
        self._capture.rebatch(batch)

    def flush(self) -> None:
        """Wait until every record is in storage, before records are read.  A rank's request for a base is
        forgotten, as its step may come again.  All ranks call it together."""
        self._bases.forget_request()
        self._unrecorded.forget()
        self._capture.unplan()
        self._capture.settle()

    @property
    def way(self) -> WayToStorage:
        """The way of its records to storage."""
        return self._capture.way

    def wait(self, limit_s: float | None) -> None:
        """Wait until the writer, which outlives this process, has every record.  TimeoutError."""
        self._capture.handed_over(limit_s)

    def close(self, limit_s: float, *, finished: bool, is_asked: bool) -> None:
        """Wait until the writer has every record, tidy up, and tell the user of steps that are lost."""
        until = time.monotonic() + limit_s
        try:
            self._optimizers.observer.close()
            self._capture.close(limit_s)
        finally:
            self._tidy_log(max(until - time.monotonic(), LEAST_S))
        self._tell(self._loss())

    def _tidy_log(self, limit_s: float) -> None:
        """Delete superfluous records: some were written after the last save had tidied up."""
        if self.group.rank == 0:
            try:
                with within(limit_s):
                    self._root.tidy_log()
            except HoldfastError as error:
                emit("tidy.failed", error=str(error))


def _parts_of(rest: Collected, names: Iterable[str]) -> Parts:
    placed = {name: rest.tensors[name].placed for name in names}
    return {name: (p.shape, p.box, p.dtype) for name, p in placed.items()}
