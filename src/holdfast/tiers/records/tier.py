"""The differential tier in a training process: it observes the optimizers, and makes a record per step.

A record is made in two parts.  When an optimizer's step begins, its gradients are final, and only the
optimizer reads them until it ends: they are copied into the ring in that time.  At
`Checkpointer.step` follow the rest of what the step changed (buffers, extras), and the record goes to the
writer.  No rank waits for another, except when all plan together what their records hold.

Here is when a record is made and what it leads on from; `optimizers` tells of steps, `capture` makes the
record, `watching` sees what no record can tell, and `bases` the full saves that records begin with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.optim import Optimizer

from holdfast.base.errors import AgentError, HoldfastError, UsageError
from holdfast.base.events import emit, span
from holdfast.base.notices import Notices
from holdfast.base.patience import within
from holdfast.base.text import listed
from holdfast.core.group import Group
from holdfast.core.layout import Box, Mesh
from holdfast.core.store import MemoryStore
from holdfast.live.collecting import collect_step
from holdfast.live.every import Every
from holdfast.live.restore.targets import RestoreOptions
from holdfast.live.saving import Save
from holdfast.live.saving.messages import digests
from holdfast.live.saving.steps import RootSteps
from holdfast.live.shelves import Shelf
from holdfast.live.state.customised import asked_once
from holdfast.live.state.lending import only_reads
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
    is_watched,
    mixed_up,
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
FAILED = "the step of an optimizer failed"
MAX_IDLE = 20
"""Records in a row without the step of any optimizer, before the user is told."""

Parts = dict[str, tuple[tuple[int, ...], Box, str]]
"""Shape, box and dtype of this rank's parts of tensors, by name."""


class IdleRecords:
    """Records in a row without the step of an optimizer: a graph that holds the whole step, say, calls no
    hooks; nor is what it writes counted."""

    def __init__(self) -> None:
        self._count = 0
        self._is_told = False

    def add(self, *, is_idle: bool) -> str:
        """Count a record; return what to tell the user, once, of many that are idle.  Empty if nothing."""
        self._count = self._count + 1 if is_idle else 0
        if self._count != MAX_IDLE or self._is_told:
            return ""
        self._is_told = True
        return (
            f"{MAX_IDLE} steps without a step of an optimizer of the state: if another one is trained "
            "with, or its steps are in a graph of a device, records do not have them"
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
        """`root`: the steps beside which records lie.  `is_tuned`: it is measured whether they pay."""
        store = root.store
        if isinstance(store, MemoryStore):
            raise UsageError(
                f"delta= cannot write to {store.url}: it is in the memory of one process, and a process "
                "of its own writes records",
                hint="give a path, such as one in /dev/shm",
            )
        self.state = state
        self.group = group
        self.on_resize = on_resize
        self._root = root
        self._notices = notices
        self._may_be_off = is_tuned
        """True if nobody has to be told that no records are made."""
        self._base_due: int | None = None
        """The step of which a full save is due, for records to lead on from."""
        self.parent: Identity | None = None
        """The state that the next record leads on from; None until there is one to begin with."""
        self.news: list[str] = []
        """Messages that the user has to be told."""
        self._capture = RecordCapture(
            group, store, options, run=run, mesh=mesh, deadline_s=group.deadline_s, tell=self._tell
        )
        self._watch = Watch()
        self._parts: Parts = {}
        """This rank's parts of objects' sharded tensors, as planned."""
        self._bases = Bases(group)
        self._unrecorded = Unrecorded()
        self._edits = 0
        """Number of records in a row that could not be, because of weights that were written."""
        self._idle = IdleRecords()
        self._clock = Clock()
        self._optimizers = ObservedOptimizers(state(), self._before, self._after_step)

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
        """Tell of what was noticed at this step, before its call ends."""
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
        replaces what they would lead on from."""
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

    def unheard(self) -> list[str]:
        failed, loss = self.error, self._loss()
        news = [loss] if loss else []
        return news if self._notices.was_told(failed) else [*news, f"records end: {failed}"]

    def _loss(self) -> str:
        """Say what is lost if the run ends now: steps that are in no record, with no full save
        since.  Empty if there are none, or if the user has been told that records end."""
        return "" if self.error is not None else self._unrecorded.text()

    def notice(self) -> HoldfastError | None:
        """The error that the user is to be told; once."""
        space = self._capture.space
        notice, space.notice = space.notice, None
        return notice

    def begin_from(
        self, identity: Identity, base: Save | None = None, *, save_bytes: int = 0
    ) -> None:
        """Lead on from the live state, which is this one, known or being saved.  `save_bytes`: bytes of a
        full save, if that is known."""
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
        """Plan records, which all ranks do together, right after `begin_from`.  Collective; blocks.

        Not within the first step of an optimizer: a loss scaler may skip that step on one rank alone, or
        one may have failed to make records.  Those that make it would wait for that rank, and that rank
        for them in whatever ranks exchange next.
        """
        if self.group.size == 1 or self._capture.is_planned:
            return
        try:
            with self._clock.held(), self._clock.once():
                self._plan()
        except UsageError:
            raise
        except Exception as error:
            self._fail(error)

    def expect(self, names: set[str]) -> None:
        """Have records hold these buffers and untrained tensors at once: they changed in steps before."""
        self._watch.learn(names, self.state())

    def end(self, why: str) -> None:
        """Record no more, until records begin from another base."""
        self._unrecorded.forget()
        if self.parent is not None:
            self._capture.drop()
            self._break(why)

    def revive(self) -> None:
        """Try again, after an error: from another base, for records are missing."""
        self._capture.revive()
        self._break("an error")

    def announce(self, run: int) -> None:
        """Go on with a writer of its own.  Blocks until all is written."""
        self._capture.adopt(run)

    def has_moved_on(self) -> bool:
        return self._capture.recorded

    @property
    def error(self) -> HoldfastError | None:
        """Why nothing is recorded any more, until records begin from another base."""
        if self._edits > MAX_EDITS:
            return UsageError(
                "weights or states of optimizers are written outside optimizer.step() at every step, "
                "which no record can tell",
                hint="make such changes in the optimizer, or do without delta=",
            )
        return self._capture.error

    def _break(self, why: str) -> None:
        """Records end here."""
        emit("delta.broken", why=why)
        self.parent, self._unrecorded.why = None, why

    def _again(self, why: str) -> None:
        """This step's record cannot be: the next ones are planned anew, from a new base."""
        self._capture.unplan()
        self._break(why)

    def _edited(self, when: str) -> None:
        """End the records here: none leads to what somebody else writes."""
        self._edits += 1
        self._again(
            "weights or states were written outside optimizer.step(), or an optimizer has others, "
            + when
        )

    def _fail(self, error: Exception) -> None:
        """Records end, and the training goes on."""
        if isinstance(error, OSError) and not isinstance(error, HoldfastError):
            error = AgentError(f"memory for records: {error.strerror or error}")
        elif not isinstance(error, HoldfastError):
            error = AgentError(f"a record could not be made: {type(error).__name__}: {error}")
        self._capture.failure = error
        self._again(error.message)

    # -- restoring --------------------------------------------------------------------------------

    def trail(self, shelves: Sequence[Shelf]) -> RecordTrail:
        """Read the headers of what is recorded after these steps.  Collective; Deadline."""
        return RecordTrail(self, shelves, self._capture.store, self._capture.run)

    def replay(
        self, log: Log, steps: list[RecordedStep], state: State, options: RestoreOptions
    ) -> RecordedStep | None:
        """Do recorded steps again from the live state they lead on from; return the last that proved sound,
        None if none did.  Collective."""
        changed = {t.name for t in log.plan(steps[-1]).tensors if t.state == "buffer"}
        self.expect(changed)
        with self._optimizers.pause():
            return Replay(log, self.group, state, options).run(steps)

    # -- an optimizer's step ----------------------------------------------------------------------

    def _before(self, call: StepCall[str]) -> None:
        if call.around == call.name:  # a class calls its parent's step
            return
        params = (p for group in call.optimizer.param_groups for p in group["params"])
        reduce_gradients(params)  # by all ranks, whether they make records or not
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
                self._begin(call.name, call.again)
        except UsageError:
            raise
        except Exception as error:
            self._fail(error)

    def _begin(self, key: str, again: bool) -> None:
        """The gradients are final: copy them.  `again`: the step before failed."""
        record = self._opened()
        if record is None:
            return
        if not self._optimizers.observer.is_last(key):
            self._again("a hook was registered that may change gradients after their copy")
            return
        one = self._optimizers[key]
        # its step may read other weights, and all count as seen after it
        sees_all = not record.applied or is_watched(one.optimizer)
        if self._watch.is_edited(None if sees_all else key):
            self._edited("between two steps")
            return
        if again:
            self._again(FAILED)
            return
        if any(a.key == key for a in record.applied):
            raise UsageError(
                f"{key!r} has made two steps between two calls of Checkpointer.step()",
                hint="call it after each optimizer step",
            )
        if name := mixed_up(one):
            self._fail(
                UsageError(
                    f"{key}: the gradient of {name} lies otherwise in memory than the parameter: torch "
                    f"{torch.__version__} rounds otherwise then in 16 bits, and its fused optimizers take "
                    "other elements'",
                    hint="a contiguous parameter and gradient",
                )
            )
            return
        if record.early is None and is_watched(one.optimizer):
            record.early = self._watch.versions(self.state())
        self._capture.gradients(record, one)
        if not only_reads(one.optimizer):
            self._after(key, one.optimizer)

    def _after_step(self, call: StepCall[str]) -> None:
        with self._clock.held():
            self._after(call.name, call.optimizer)

    def _after(self, key: str, optimizer: Optimizer) -> None:
        """The gradients may be changed as soon as they are copied.  Hooks may have written to whatever."""
        if self._capture.open is not None:
            misdeclared = self._capture.let_go()
            self._watch.accept_writes(None if is_watched(optimizer) else key)
            for what, names in misdeclared.items():
                self._tell_of(names, what)
            if misdeclared:
                self._again("gradients that are not as declared")

    def _tell(self, text: str) -> None:
        self.news += [text] if text else []

    def _tell_of(self, names: list[str], what: str) -> None:
        few = listed(name.removesuffix(f".{GRAD}") for name in names)
        self.news.append(
            f"gradients of {few} have {what}: something changes them after their compression; "
            "they are recorded whole from now on"
        )

    def _opened(self) -> OpenRecord | None:
        """The record under way; a new one if there is none.  Blocks while the queue is full."""
        if self._capture.open is not None:
            return self._capture.open
        if self._capture.failure is not None:
            self._break(self._capture.failure.message)
            return None
        with self._clock.once():
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
        objects = self._of_objects(rest, state)
        self._parts = _parts_of(rest, objects)
        values |= objects
        self._capture.plan(named, groups, values, encode_extras(rest.extras))

    def _of_objects(self, rest: Collected, state: State) -> dict[str, torch.Tensor]:
        """Sharded tensors in the state of objects: records hold them whole at every step."""
        known = self._watch.tensors(state)
        return {name: t.source for name, t in rest.tensors.items() if name not in known}

    # -- a step of the training -------------------------------------------------------------------

    def record(self, step: int, save_every: int | None = None) -> None:
        """Add what else the step changed, which is over, and send the record off.  Returns at once.

        `save_every`: steps between full saves, as far as that is known.
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
            self._again(FAILED)
            return
        if self._optimizers.follow(self.state()):
            self._again("the state has other optimizers")
            return
        with self._clock.held(), span("delta.call", step=step), asked_once():
            state = self.state()
            rest = collect_step(state, self._optimizers.groups, self.on_resize)
            changed = self._watch.changed(state)
            if self._watch.is_edited():
                self._edited("after it")
                return
            if not changed <= self._watch.changing:  # such as the first step of a batch norm
                self._watch.changing |= changed
                self._again("buffers change that did not before")
                return
            try:
                record = self._opened()
                if record is not None:
                    self._finish(record, step, parent, rest=rest, changed=changed, state=state)
            except Exception as error:
                self._fail(error)

    def check_save(self, step: int) -> None:
        """UsageError if a full save under this number would not be of the state that records lead to."""
        before = -1 if self.parent is None else self.parent[1]
        if step < before:
            raise UsageError(
                f"step {step} comes before step {before}, and records lead on from it: from another state "
                "they would lead elsewhere",
                hint="save under the number of the step that was made",
            )
        if step == before and self._capture.open is not None:
            raise UsageError(
                f"step {step} was recorded, and an optimizer has made a step since: this is another state, "
                "from which records would lead elsewhere",
                hint="save before the next optimizer step, or under its number",
            )

    def _check_number(self, step: int, before: int) -> None:
        """UsageError for a step that was done, under a number at which it could not be found."""
        if self._capture.open is not None:
            self._capture.drop()
            raise UsageError(
                f"step {step} comes after step {before}: numbers of recorded steps must grow",
                hint="call Checkpointer.step() once after each optimizer step, with its number",
            )

    def _check_saved(self, step: int) -> None:
        """UsageError if a full save of this step was made before an optimizer's step that is part of it."""
        identity = self._capture.run, step
        if self._bases.is_of_another_state(identity, self._optimizers.num_begun):
            self._again(f"step {step} was saved before it was made")
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
        objects = self._of_objects(rest, state)
        values |= objects
        if _parts_of(rest, objects) != self._parts:
            self._again("the state of an object has other tensors")
            return
        misfit = self._capture.fill(record, encode_extras(rest.extras), values)
        if misfit:
            self._again(misfit)
            return
        if news := self._idle.add(is_idle=not record.applied):
            self.news.append(news)
        unchanged = tuple(sorted(self._watch.changing - changed))
        late = None if record.early is None else self._watch.written_since(record.early, state)
        self.parent = self._capture.hand_over(
            record, step, parent, unchanged=unchanged, notes=digests(rest), late=late
        )
        self._unrecorded.forget()
        self._edits = 0
        self._clock.made()
        self._optimizers.observer.come_last()

    def spent(self) -> Spent:
        """The time that the training thread was held since this was last asked."""
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
        """Write so many records per file from now on.  All ranks say so at the same step."""
        self._capture.rebatch(batch)

    def flush(self) -> None:
        """Wait until nothing is on its way to storage, for all will be read.  A rank's wish for a base is
        forgotten: its step may come again.  All ranks do so together."""
        self._bases.forget_wish()
        self._unrecorded.forget()
        self._capture.unplan()
        self._capture.settle()

    @property
    def way(self) -> WayToStorage:
        """The way of its records to storage."""
        return self._capture.way

    def wait(self, limit_s: float | None) -> None:
        """Wait until the writer has every record: it outlives this process.  TimeoutError."""
        self._capture.handed_over(limit_s)

    def close(self, limit_s: float, *, finished: bool, is_asked: bool) -> None:
        """Wait until the writer has every record, and tidy up.  Steps that are lost are told."""
        until = time.monotonic() + limit_s
        try:
            self._optimizers.observer.close()
            self._capture.close(limit_s)
        finally:
            self._tidy_log(max(until - time.monotonic(), LEAST_S))
        self._tell(self._loss())

    def _tidy_log(self, limit_s: float) -> None:
        """Tidy up records that were written after the last save had tidied up."""
        if self.group.rank == 0:
            try:
                with within(limit_s):
                    self._root.tidy_log()
            except HoldfastError as error:
                emit("tidy.failed", error=str(error))


def _parts_of(rest: Collected, names: Iterable[str]) -> Parts:
    placed = {name: rest.tensors[name].placed for name in names}
    return {name: (p.shape, p.box, p.dtype) for name, p in placed.items()}
