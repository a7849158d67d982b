"""The differential tier in a training process: it observes the optimizers, and makes a record per step.

A record is made in two parts.  When an optimizer's step begins, its gradients are final, and only the
optimizer reads them until it ends: they are copied into the ring in that time.  At
`Checkpointer.step` follow the rest of what the step changed (buffers, extras), and the record goes to the
writer.  No rank waits for another, except when all plan together what their records hold.

Here is when a record is made and what it leads on from; `state.observer` tells of steps, `capture` makes
the record, and `watching` sees what no record can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import msgspec
import torch
from torch.optim import Optimizer

from holdfast.codec.digest import hexdigest
from holdfast.delta.capture import Groups, OpenRecord, RecordCapture
from holdfast.delta.clock import Clock, Spent
from holdfast.delta.log import Log, RecordedStep
from holdfast.delta.options import Delta
from holdfast.delta.recording import (
    GRAD,
    encode_extras,
    is_watched,
    mixed_up,
    only_reads,
    optimizers,
    refused,
)
from holdfast.delta.replay import Replay, survey
from holdfast.delta.segment import Identity
from holdfast.delta.watching import Watch
from holdfast.errors import AgentError, HoldfastError, UsageError
from holdfast.events import emit, span
from holdfast.group import Group
from holdfast.layout import Box, Mesh
from holdfast.restore.targets import RestoreOptions
from holdfast.saving import Save
from holdfast.state.customised import asked_once
from holdfast.state.live import Live, State, is_optimizer
from holdfast.state.observer import Observer, Order, StepCall
from holdfast.state.placed import reduce_gradients
from holdfast.state.rest import collect_rest
from holdfast.state.wrapped import bare
from holdfast.store import MemoryStore, Store

MAX_EDITS = 3
FAILED = "the step of an optimizer failed"
MAX_IDLE = 20
"""Records in a row without the step of any optimizer, before the user is told."""


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
        if isinstance(store, MemoryStore):
            raise UsageError(
                f"delta= cannot write to {store.url}: it is in the memory of one process, and a process "
                "of its own writes records",
                hint="give a path, such as one in /dev/shm",
            )
        self.state = state
        self.group = group
        self._store, self._run = store, run
        self.on_resize = on_resize
        self.parent: Identity | None = None
        """The state that the next record leads on from; None until there is one to begin with."""
        self.paused = False
        self.recorded = False
        """True if this run has made records."""
        self.news: list[str] = []
        """Messages that the user has to be told."""
        self._capture = RecordCapture(
            group, store, options, run=run, mesh=mesh, deadline_s=deadline_s
        )
        self._watch = Watch()
        self._parts: dict[str, tuple[tuple[int, ...], Box, str]] = {}
        """Shape, box and dtype of this rank's parts of objects' sharded tensors, as planned."""
        self._base: Save | None = None
        self._begun = False
        self._bases = 0
        """Number of the next wish for a base: so many times ranks were done with one."""
        self._edits = 0
        """Number of records in a row that could not be, because of weights that were written."""
        self._unsaved: tuple[int, int] | None = None
        """The first and the last step since the newest record or full save, if no record has them."""
        self._why = "no full save was made yet"
        """Why no record has the next step, while `parent` is None."""
        self._idle = 0
        """Number of records in a row without the step of any optimizer."""
        self._told_of_idle = False
        self._early: dict[str, tuple[int, int]] | None = None
        """Versions of what no optimizer changes, when this record's first step that may read it began; None
        if none may."""
        self._clock = Clock()
        self._steps = optimizers(state())
        self._observer = self._observe()

    # -- what records lead on from ----------------------------------------------------------------

    def needs_base(self, step: int) -> bool:
        """True if all ranks make a full save of this step, for records to lead on from.

        One rank may need it alone: it says so, and all do it at the step after, when all have heard of it.
        """
        if self._base is not None and self._base.done():
            failed, self._base = self._base.error is not None or self._base.skipped, None
            if failed:
                self._break("the save that records lead on from failed")
        space = self._capture.space
        begins = self.parent is None and not self._capture.is_behind and not space.is_paused
        wanted = self.error is None and (begins or space.is_due)
        if self.group.size == 1 or not self._begun:
            return wanted
        key = f"delta/base/{self._bases}"
        if wanted:
            self.group.post_first(key, str(step + 1).encode())
        found = self.group.peek(key)
        if found is None or step < int(found):
            return False
        self._bases += 1
        self._capture.unplan()
        return True

    def saving(self, save: Save) -> None:
        """Note that a full save to storage has begun."""
        self._capture.space.saving(save)
        if self._unsaved is not None and save.step >= self._unsaved[1]:
            self._unsaved = None

    def loss(self) -> str:
        """Say what is lost if the run ends now: steps that are in no record, with no full save
        since.  Empty if there are none, or if the user has been told that records end."""
        if self._unsaved is None or self.error is not None:
            return ""
        first, last = self._unsaved
        steps = f"step {last} is" if first == last else f"steps {first} to {last} are"
        return (
            f"{steps} in no record and no full save ({self._why}): a restart does not have them; "
            f"save({last}) before close() keeps them"
        )

    def notice(self) -> HoldfastError | None:
        """The error that the user is to be told; once."""
        notice, self._capture.notice = self._capture.notice, None
        return notice

    def begin_from(self, identity: Identity, base: Save | None = None) -> None:
        """Lead on from the live state, which is this one, known or being saved."""
        self._capture.drop()
        if self._follow_optimizers() or self._is_stale():
            self._capture.unplan()
        self._begun, self._unsaved = True, None
        self.parent, self._base = identity, base
        self._observer.forget_failed()
        self._observer.come_last()
        self._watch.begin(self.state())

    def prepare(self) -> None:
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
        self._unsaved = None
        if self.parent is not None:
            self._capture.drop()
            self._break(why)

    def revive(self) -> None:
        """Try again, after an error: from another base, for records are missing."""
        self._capture.revive()
        self._break("an error")

    def adopt(self, run: int) -> None:
        """Go on as another run, with a writer of its own.  Blocks until all is written."""
        self.recorded = False
        self._run = run
        self._capture.adopt(run)

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
        self.parent, self._why = None, why
        self._early = None

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

    def survey(self, since: int) -> Log:
        """Return what is recorded after step `since`, in this run's root.  Collective; Deadline."""
        return survey(self._store, self.group, since, self._run)

    def replay(
        self, log: Log, steps: list[RecordedStep], state: State, options: RestoreOptions
    ) -> RecordedStep | None:
        """Do recorded steps again from the live state they lead on from; return the last that proved sound,
        None if none did.  Collective."""
        changed = {t.name for t in log.plan(steps[-1]).tensors if t.state == "buffer"}
        self.expect(changed)
        with self.pause():
            return Replay(log, self.group, state, options).run(steps)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Steps of optimizers in this block are no steps of the training."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    # -- an optimizer's step ----------------------------------------------------------------------

    def _before(self, call: StepCall[str]) -> None:
        if self.paused or call.around == call.name:  # a class calls its parent's step
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
        if not self._observer.is_last(key):
            self._again("a hook was registered that may change gradients after their copy")
            return
        if self._watch.is_edited(key if record.applied else None):
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
        one = next(one for one in self._steps if one.key == key)
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
        if not record.applied:
            self._early = None
        if self._early is None and is_watched(one.optimizer):
            self._early = self._watch.versions(self.state())
        self._capture.gradients(record, one)
        if not only_reads(one.optimizer):
            self._after(key, one.optimizer)

    def _after_step(self, call: StepCall[str]) -> None:
        with self._clock.held():
            self._after(call.name, call.optimizer)

    def _after(self, key: str, optimizer: Optimizer) -> None:
        """The gradients may be changed as soon as they are copied.  Hooks may have written to whatever."""
        if self._capture.open is not None:
            misdeclared = self._capture.wait_copied()
            self._watch.accept_writes(None if is_watched(optimizer) else key)
            for what, names in misdeclared.items():
                self._tell_of(names, what)
            if misdeclared:
                self._again("gradients that are not as declared")

    def _tell_of(self, names: list[str], what: str) -> None:
        few = ", ".join(name.removesuffix(f".{GRAD}") for name in names[:3])
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        self.news.append(
            f"gradients of {few}{more} have {what}: something changes them after their compression; "
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
                "storage is too slow" if self._capture.notice is None else "the log is at its bound"
            )
            self._break(slow if error is None else error.message)
        return record

    def _follow_optimizers(self) -> bool:
        """True if the state has other optimizers than those observed; these are observed now."""
        state = self.state()
        found = [(key, id(bare(value))) for key, value in state.items() if is_optimizer(value)]
        if found == [(one.key, id(one.optimizer)) for one in self._steps]:
            return False
        self._observer.close()
        self._steps = optimizers(state)
        self._observer = self._observe()
        return True

    def _observe(self) -> Observer[str]:
        optimizers = {one.key: one.optimizer for one in self._steps}
        return Observer(optimizers, Order.RECORDS, self._before, self._after_step)

    def _is_stale(self) -> bool:
        """True if an optimizer has other parameters than planned."""
        return any(
            [id(p) for g in one.optimizer.param_groups for p in g["params"]]
            != [id(p) for _, p in one.params]
            for one in self._steps
        )

    def _plan(self) -> None:
        """Plan what records hold from now on.  Collective; blocks."""
        state = self.state()
        self._steps = optimizers(state)
        values = self._watch.expect(state)
        rest = collect_rest(state, self._groups, self.on_resize)
        objects = self._of_objects(rest, state)
        self._parts = _places(rest, objects)
        values |= objects
        self._capture.plan(self._steps, self._groups, values, encode_extras(rest.extras))

    def _of_objects(self, rest: Live, state: State) -> dict[str, torch.Tensor]:
        """Sharded tensors in the state of objects: records hold them whole at every step."""
        known = self._watch.tensors(state)
        return {name: t.source for name, t in rest.tensors.items() if name not in known}

    @property
    def _groups(self) -> Groups:
        return {
            one.key: tuple(tuple(name for name, _ in pairs) for pairs in one.groups)
            for one in self._steps
        }

    # -- a step of the training -------------------------------------------------------------------

    def record(self, step: int, save_every: int | None = None) -> None:
        """Add what else the step changed, which is over, and send the record off.  Returns at once.

        `save_every`: steps between full saves, as far as that is known.
        """
        self._capture.save_every = save_every
        parent = self.parent
        if parent is not None and step <= parent[1]:
            self._check_number(step, parent[1])
            return
        self._unsaved = (self._unsaved or (step, step))[0], step
        if parent is None:
            return
        if self._observer.forget_failed():
            self._again(FAILED)
            return
        if self._follow_optimizers():
            self._again("the state has other optimizers")
            return
        with self._clock.held(), span("delta.call", step=step), asked_once():
            state = self.state()
            rest = collect_rest(state, self._groups, self.on_resize)
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

    def _check_number(self, step: int, before: int) -> None:
        """UsageError for a step that was done, under a number at which it could not be found."""
        if self._capture.open is not None:
            self._capture.drop()
            raise UsageError(
                f"step {step} comes after step {before}: numbers of recorded steps must grow",
                hint="call Checkpointer.step() once after each optimizer step, with its number",
            )

    def _finish(
        self,
        record: OpenRecord,
        step: int,
        parent: Identity,
        *,
        rest: Live,
        changed: set[str],
        state: State,
    ) -> None:
        """Complete a record, which leads on from `parent`, and hand it over."""
        planned = self._watch.changing  # other ranks may have changed what this one has not
        values = {n: t for n, t in self._watch.tensors(state).items() if n in planned}
        objects = self._of_objects(rest, state)
        values |= objects
        if _places(rest, objects) != self._parts:
            self._again("the state of an object has other tensors")
            return
        misfit = self._capture.fill(record, encode_extras(rest.extras), values)
        if misfit:
            self._again(misfit)
            return
        self._count_idle(record)
        unchanged = tuple(sorted(self._watch.changing - changed))
        late = None if self._early is None else self._watch.written_since(self._early, state)
        self.parent = self._capture.hand_over(
            record, step, parent, unchanged=unchanged, notes=_notes(rest), late=late
        )
        self._early = self._unsaved = None
        self._edits = 0
        self.recorded = True
        self._clock.made()
        self._observer.come_last()

    def _count_idle(self, record: OpenRecord) -> None:
        """Tell of many records without an optimizer's step: a graph that holds the whole step, say,
        calls no hooks; nor is what it writes counted."""
        self._idle = 0 if record.applied else self._idle + 1
        if self._idle == MAX_IDLE and not self._told_of_idle:
            self._told_of_idle = True
            self.news.append(
                f"{MAX_IDLE} steps without a step of an optimizer of the state: if another one is trained "
                "with, or its steps are in a graph of a device, records do not have them"
            )

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

    def settle(self) -> None:
        """Wait until nothing is on its way to storage, for all will be read.  A rank's wish for a base is
        forgotten: its step may come again.  All ranks do so together."""
        self._bases += 1
        self._unsaved = None
        self._capture.unplan()
        self._capture.settle()

    def handed_over(self, limit_s: float | None) -> None:
        """Wait until the writer has every record: it outlives this process.  TimeoutError."""
        self._capture.handed_over(limit_s)

    def close(self, limit_s: float) -> None:
        self._observer.close()
        self._capture.close(limit_s)


def _places(rest: Live, names: Iterable[str]) -> dict[str, tuple[tuple[int, ...], Box, str]]:
    """Shape, box and dtype of this rank's parts of tensors, by name."""
    placed = {name: rest.tensors[name].placed for name in names}
    return {name: (p.shape, p.box, p.dtype) for name, p in placed.items()}


def _notes(rest: Live) -> dict[str, tuple[str, str]]:
    """Digest and rule of each of a step's extras, by key."""
    return {
        key: (
            hexdigest(msgspec.json.encode([value, rest.contents.get(key, [])])),
            rest.rules.get(key, ""),
        )
        for key, value in rest.extras.items()
    }
