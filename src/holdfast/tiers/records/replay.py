"""Replay: from a restored state through the records to the newest step, by the real optimizers.

A step of a training is a function: weights, optimizer states and gradients in, weights and states out.
Gradients come from data and are lost with the process; the rest follows from them.  So a record holds the
gradients of one step as the optimizer read them (reduced, clipped), the hyperparameters that it used, and
the few other values that changed, such as buffers.  A replay has the optimizer make the same steps again,
without data, forward or backward:

    full step 4          record 5           record 6           record 7
    weights, states      gradients          gradients          gradients
         |                   |                  |                  |
         +---> step() of ----+----> step() -----+----> step() -----+----> the state after step 7,
               the live                                                   bit for bit
               optimizer

Each record is read and verified whole before any of it is applied, so a damaged record ends the replay
exactly at the step before.  The next record is read while one is applied.  Records have the shardings of
their run and are resharded when they are read, as a full step is; optimizers that use whole tensors need
the recorded layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch

from holdfast.base.errors import (
    PASSED_OVER,
    Deadline,
    FormatError,
    NotRecoverable,
    StateMismatch,
    warn_user,
)
from holdfast.base.events import emit, span
from holdfast.base.text import listed
from holdfast.base.threads import Worker
from holdfast.base.wire import decode_json, decode_msgpack
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.peers import raise_on_all
from holdfast.core.checkpoint.reading import read_together
from holdfast.core.checkpoint.recorded import segments_in
from holdfast.core.checkpoint.rows import ArrayTarget, Want, plan_rows
from holdfast.core.group import Group
from holdfast.core.layout import Box
from holdfast.core.store import Store
from holdfast.live.kinds.choosing import kinds_of
from holdfast.live.kinds.restoring import Restoring
from holdfast.live.kinds.values import only_tensors
from holdfast.live.ragged import is_ragged
from holdfast.live.restore.compare import judge_together
from holdfast.live.restore.decoding import decode_value
from holdfast.live.restore.former_names import are_former
from holdfast.live.restore.mismatches import Problems
from holdfast.live.restore.param_groups import fill_in_place, in_kind_of, put_groups
from holdfast.live.restore.targets import RestoreOptions, is_known, target_of
from holdfast.live.saving.merging import merge_extras
from holdfast.live.sources import Sources
from holdfast.live.state.agreed import Agreement
from holdfast.live.state.blockwise import Blockwise, steps_by_itself
from holdfast.live.state.devices import devices_of, wait_for
from holdfast.live.state.gradient_copies import is_torchs
from holdfast.live.state.modules import named_parameters
from holdfast.live.state.named import Prepared
from holdfast.live.state.observer import hooked, hooks_after, unhooked, without_hooks_before
from holdfast.live.state.optimizer_wrappers import ELEMENTWISE, stepping
from holdfast.live.state.placed import local_of
from holdfast.live.state.recognising import State, modules_in, stages
from holdfast.tiers.records.finding import checkpoint_of, headers_behind, take_copies
from holdfast.tiers.records.log import Log, LogSegment, RecordedStep, read_headers
from holdfast.tiers.records.optimizers import GRAD, NamedOptimizer, grad_name, optimizers
from holdfast.tiers.records.packing import PACKED, PackedPart, entries, packed_name, parts_of
from holdfast.tiers.records.places import within
from holdfast.tiers.records.planning import ROUNDED, record_tensors
from holdfast.tiers.records.queue import hang_up_former
from holdfast.tiers.records.watching import buffers, untrained
from holdfast.tiers.records.writer_registry import WriterEntry, await_others, writers


def survey(store: Store, group: Group, since: int, newest: int, run: int, keys: list[str]) -> Log:
    """Return the log of all records after step `since`, and of all records of runs after run `newest`.

    First waits for writers of runs before `run`; Deadline if one is still at work then.  `keys`: rank 0's
    listing of the log, which it repeats after such a wait.  Each rank reads its share of the headers, and
    every plan.  Collective.
    """

    def look(keys: list[str]) -> bytes:
        return msgspec.json.encode((segments_in(keys, since, newest), writers(store, keys, run)))

    kind = tuple[list[str], dict[str, WriterEntry]]
    keys, others = decode_json(group.from_rank0(lambda: look(keys)), kind)
    if others:
        hang_up_former(one.pid for one in others.values() if one.is_here())
        with raise_on_all(group, since):
            if left := await_others(others):
                raise Deadline(
                    f"a writer of an earlier run is still at work: {left[0]}",
                    hint="its storage may hang; restart when this writer has ended",
                )
        answer = group.from_rank0(lambda: look(store.list("log/")))
        keys, _ = decode_json(answer, kind)
    own = keys[group.rank :: group.size]
    with span("log.headers", files=len(own)):
        mine = read_headers(store, own)
    mine += headers_behind(store, {*own} - {one.key for one in mine}, group)
    headers = group.all_gather(msgspec.msgpack.encode(mine))
    sound = [f for data in headers for f in decode_msgpack(data, list[LogSegment])]
    log = Log(store, sound, keys)
    plans: list[str] = []
    with raise_on_all(group, since):
        plans = log.unread_plans()
    for data in group.all_gather(msgspec.json.encode(plans)):
        log.leave_out(decode_json(data, list[str]))
    return log


def _like(value: torch.Tensor) -> torch.Tensor:
    """Memory for another value of a tensor, with the padding that a ragged one has."""
    if is_ragged(value):
        return value.detach().clone()
    return torch.empty_like(value, requires_grad=False)


class RecordContents:
    """Memory into which one record is read: gradients, cut as the parameters are, and other values."""

    def __init__(self, named: list[NamedOptimizer]) -> None:
        self.gradients: dict[str, torch.Tensor] = {}
        self.values: dict[str, torch.Tensor] = {}
        for one in named:
            for name, p in one.params:
                with torch.no_grad():
                    full = grad_name(one.key, name)
                    make = torch.zeros_like if is_ragged(p) else torch.empty_like  # of padding
                    self.gradients[full] = make(p, requires_grad=False)
        self.packed: dict[str, np.ndarray[Any, Any]] = {}
        """Bytes of packed sparse gradients, by name."""

    def wait(self) -> None:
        """Wait until devices have done the queued steps that use these gradients."""
        wait_for(devices_of(self.gradients.values()))


class Replay:
    """Repeats recorded steps, from the state that they lead on from.  Collective."""

    def __init__(self, log: Log, group: Group, state: State, options: RestoreOptions) -> None:
        self.log = log
        self.group = group
        self.state = state
        self.options = options
        self.optimizers = optimizers(state)
        self.values = {**untrained(state), **buffers(state)}
        self.live = record_tensors(self.optimizers, self.values)
        self._blockwise = {one.key: Blockwise(one.optimizer) for one in self.optimizers}
        self._resized: dict[tuple[int, str], bool] = {}
        """By run and name of a plan: True if its records were made on another layout."""
        self._packing: dict[tuple[int, str], dict[tuple[str, int], list[PackedPart]]] = {}
        """By run and name of a plan: the packed parts, by optimizer and rank."""

    def run(self, steps: list[RecordedStep]) -> RecordedStep | None:
        """Apply these steps up to the first damaged record, and put back the last one's extras.

        Returns the last step applied; None if there is none.
        """
        plans = {(s.run, s.plan): s for s in steps}
        self._resized = {plan: self._is_resized(step) for plan, step in plans.items()}
        self._check(steps)
        memory = [RecordContents(self.optimizers), RecordContents(self.optimizers)]
        pending: dict[str, torch.Tensor] = {}
        last: RecordedStep | None = None
        held = _tensors_held(self.optimizers)
        with Worker("holdfast-replay") as ahead, held, span("replay") as fields:
            reading = ahead.submit(self._read, steps[0], memory[0])
            for number, step in enumerate(steps):
                contents, other = memory[number % 2], memory[(number + 1) % 2]
                try:
                    reading.result()
                except PASSED_OVER as error:
                    if not self._read_copy(step, contents):
                        emit("replay.ended", step=step.step, error=str(error))
                        break
                values = dict(contents.values)
                other.wait()
                if number + 1 < len(steps):
                    reading = ahead.submit(self._read, steps[number + 1], other)
                if (late := _late_names(step)) is None:
                    pending |= values
                else:  # something in this step may read them
                    self._put_values(pending | {n: v for n, v in values.items() if n not in late})
                    pending = {n: v for n, v in values.items() if n in late}
                with _naming_step(step):
                    self._apply(step, contents)
                last = step
            fields["steps"] = 0 if last is None else steps.index(last) + 1
        for one in self.optimizers:
            for _, p in one.params:
                p.grad = None
        if last is not None:
            self._put_values(pending)
            with _naming_step(last):
                self._put_rest(last)
        for contents in memory:  # devices may still read memory that is freed now
            contents.wait()
        return last

    def _put_values(self, values: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self.values[name].copy_(value)

    def _check(self, steps: list[RecordedStep]) -> None:
        """Raise before anything is applied: NotRecoverable for steps that only the recorded layout can
        repeat, StateMismatch for gradients and changed values that no rank has a place for."""
        for step in steps:
            self._check_scales(step)
        with raise_on_all(self.group, steps[0].step):
            self._check_dtypes(steps)
        lacking = self._lacking(steps)
        if lacking and self.options.strict:
            hint = "build the same model and optimizers, or pass strict=False: it leaves these out"
            if are_former(self.state, lacking):
                hint = (
                    "an earlier version of holdfast kept wrappers in these names: run `holdfast replay "
                    f"{self.log.store.url} DST --to {steps[-1].step}`, and restore from DST"
                )
            raise StateMismatch(
                f"records have gradients or values of {listed(lacking)}, which the live state lacks",
                lacking,
                hint=hint,
            )
        self._warn_of_hooks(steps)

    def _lacking(self, steps: list[RecordedStep]) -> tuple[str, ...]:
        """Names of recorded gradients whose parameter no rank has, and of recorded values whose tensor no
        rank has.  Collective."""
        plans = {(s.run, s.plan): s for s in steps}.values()
        gradients = {
            (key, name)
            for step in plans
            for segment in step.segments
            for key, groups in segment.header.groups.items()
            for names in groups
            for name in names
        }
        # the extras of objects, and of lists and dicts with objects, state which tensors they take
        objects = {k for k, v in self.state.items() if stages(v) is None and not only_tensors(v)}
        values = {
            ("", t.name)
            for s in plans
            for t in self.log.plan(s).tensors
            if t.state == "buffer" and t.name.partition(".")[0] not in objects
        }
        recorded = sorted(gradients | values)
        own = {(one.key, name) for one in self.optimizers for name, _ in one.params}
        own |= {("", name) for name in self.values}
        own |= {
            ("", f"{key}.{name}")
            for key, module in modules_in(self.state)
            for name, _ in named_parameters(module)
        }
        masks = self.group.all_gather(
            np.packbits(np.array([n in own for n in recorded], bool)).tobytes()
        )
        bits = np.unpackbits(np.bitwise_or.reduce([np.frombuffer(t, np.uint8) for t in masks]))
        nowhere = [one for one, known in zip(recorded, bits) if not known]
        return tuple(
            f"{key}.{name}" if key else name
            for key, name in nowhere
            if any(
                name in step.with_gradient(key) if key else name not in step.unchanged()
                for step in steps
            )
        )

    def _check_dtypes(self, steps: list[RecordedStep]) -> None:
        """Raise StateMismatch if the model has another dtype than the recorded one: its steps differ."""
        for step in {(s.run, s.plan): s for s in steps}.values():
            for t in self.log.plan(step).tensors:
                known = self.live.tensors.get(t.name)
                here = known.placed.dtype if known is not None else t.dtype
                if t.state == GRAD and t.dtype not in (here, *ROUNDED):
                    raise StateMismatch(
                        f"records have {t.dtype} gradients of {t.name.removesuffix('.' + GRAD)!r}, which "
                        f"is {here} in the live state",
                        hint=f"restore(step={steps[0].parent[1]}, cast=True) takes the full step alone",
                    )

    def _check_scales(self, step: RecordedStep) -> None:
        """Raise NotRecoverable on another layout, unless all ranks with the same parameters made the same
        steps with the same values of their GradScalers."""
        if not self._resized[step.run, step.plan]:
            return
        for key, ranks in step.applied().items():
            scales = {(one.found_inf, one.grad_scale) for one in ranks.values()}
            names = {n for rank in ranks for n in step.names(key, rank)}
            skipped = any(names & step.names(key, rank) for rank in step.ranks_without(key))
            if len(scales) > 1 or skipped:
                raise NotRecoverable(
                    f"ranks scaled the gradients of {key!r} differently, or some of them skipped the step, "
                    "so the records cannot be replayed on another layout",
                    step=step.step,
                    hint="restart on that layout once and save durably; then change it",
                )

    def _warn_of_hooks(self, steps: list[RecordedStep]) -> None:
        """Warn if hooks after an optimizer's step are missing: no record has what they write to weights."""
        for one in self.optimizers:
            applied = [a for s in steps for a in s.applied().get(one.key, {}).values()]
            recorded, here = max((a.hooks for a in applied), default=0), hooks_after(one.optimizer)
            if recorded > here:
                warn_user(
                    f"{one.key!r} had {recorded} hooks after its steps when they were recorded, and has "
                    f"{here} now: what they write to weights is missing; register them before restore()"
                )

    def _is_resized(self, step: RecordedStep) -> bool:
        """True if the records were made on another layout.  NotRecoverable if that cannot be replayed."""
        checkpoint = self.log.open(step, {}, {})
        lenient = _lenient(self.options)
        live = Prepared(tensors=self.live.tensors)
        resized = judge_together(checkpoint, live, Problems(), None, self.group, lenient)
        kinds = {o.key: type(stepping(o.optimizer)).__name__ for o in self.optimizers}
        whole = [key for key, kind in kinds.items() if kind not in ELEMENTWISE]
        if resized and whole:
            raise NotRecoverable(
                f"{whole[0]!r} looks at whole tensors, so its records of "
                f"[{checkpoint.manifest.layout}] cannot be replayed on another layout",
                hint="restart on that layout once and save durably; then change it",
            )
        return resized

    def _read(self, step: RecordedStep, into: RecordContents) -> None:
        """Read what a replay uses of a record: gradients, changed values, extras.  Collective."""
        with raise_on_all(self.group, step.step):
            checkpoint = self.log.open(step, {}, {})
            wants, sparse = self._wanted(step, checkpoint, into)
            for file in checkpoint.manifest.files[self.group.rank :: self.group.size]:
                checkpoint.file_extras(file)
        read_together(checkpoint.images, wants, self.group if self.group.size > 1 else None)
        if self.log.plan(step).packed:  # the same on all ranks
            with raise_on_all(self.group, step.step):
                self._unpack(step, sparse, into.packed)

    def _read_copy(self, step: RecordedStep, into: RecordContents) -> bool:
        """Read the copy of a damaged record in the home behind; False if no copy is sound."""
        if not take_copies(self.log, step, self.group):
            return False
        try:
            self._read(step, into)
        except PASSED_OVER:
            return False
        return True

    def _wanted(
        self, step: RecordedStep, checkpoint: Checkpoint, into: RecordContents
    ) -> tuple[list[Want], dict[str, torch.Tensor]]:
        """Return what to read into `into`, and the gradients to unpack afterwards, by name.  Makes memory
        for packed gradients and changed values."""
        wants: list[Want] = []
        sparse: dict[str, torch.Tensor] = {}
        packed = {t.name for t in self.log.plan(step).packed}
        for one in self.optimizers:
            if one.key not in step.applied() or self._skips(step, one):
                continue
            given = step.with_gradient(one.key)
            dense: list[Want] = []
            for full in (grad_name(one.key, name) for name, _ in one.params if name in given):
                if full in packed:
                    sparse[full] = into.gradients[full]
                else:
                    dense += self._wants(checkpoint, full, into.gradients[full])
            others = step.ranks_without(one.key)
            if others and {r.file.rank for r in plan_rows(checkpoint.manifest, dense)} & others:
                raise _no_gradient(step, one.key)
            wants += dense
        into.packed = _room_for_packed(checkpoint)
        for name, array in into.packed.items():
            whole = Box((0,), array.shape)
            wants.append(Want(checkpoint.index(name), whole, ArrayTarget(array)))
        into.values = self._changed(step, checkpoint)
        for name, tensor in into.values.items():
            wants += self._wants(checkpoint, name, tensor)
        return wants, sparse

    def _unpack(
        self,
        step: RecordedStep,
        sparse: dict[str, torch.Tensor],
        packed: dict[str, np.ndarray[Any, Any]],
    ) -> None:
        """Fill the gradients of which only nonzero elements were recorded.  FormatError."""
        for tensor in sparse.values():
            local_of(tensor).zero_()
        for (key, rank), parts in self._parts(step).items():
            data = packed.get(packed_name(key, rank))
            if data is None:
                boxes = [(self._box(part.name), part.box) for part in parts if part.name in sparse]
                if any(here & box for here, box in boxes):
                    raise _no_gradient(step, key)
                continue
            for one in entries(parts, data):
                if one.part.name in sparse:
                    one.into(local_of(sparse[one.part.name]), self._box(one.part.name))

    def _box(self, name: str) -> Box:
        """This rank's part of a tensor."""
        return self.live.tensors[name].placed.box

    def _parts(self, step: RecordedStep) -> dict[tuple[str, int], list[PackedPart]]:
        """The packed parts, by optimizer and rank; the same for all records of a plan."""
        known = (step.run, step.plan)
        if known not in self._packing:
            plan = self.log.plan(step)
            agreement = Agreement(plan.mesh, plan.shardings, plan.tensors, plan.aliases)
            packed: dict[tuple[str, int], list[PackedPart]] = {}
            for rank in range(step.world):
                for part in parts_of(agreement, plan.packed, rank):
                    packed.setdefault((part.key, rank), []).append(part)
            self._packing[known] = packed
        return self._packing[known]

    def _changed(self, step: RecordedStep, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
        """Memory for the values that a step changed, by name."""
        same = step.unchanged()
        names = [n for n in self.values if n not in same and is_known(checkpoint, n)]
        with torch.no_grad():
            return {n: _like(self.values[n]) for n in names}

    def _wants(self, checkpoint: Checkpoint, name: str, tensor: torch.Tensor) -> list[Want]:
        if not is_known(checkpoint, name):
            raise StateMismatch(
                f"the log has no gradient of {name.removesuffix('.' + GRAD)!r}", (name,)
            )
        t, local = self.live.tensors.get(name), local_of(tensor)
        index = checkpoint.index(name)
        dtype = checkpoint.manifest.tensors[index].dtype
        if t is None:  # no part of it is on this rank
            return []
        wants = []
        for box in (part.box for part in t.parts if part.box.size):
            at = within(t, box)
            values = local if at is None else local[at]
            wants.append(Want(index, box, target_of(values, dtype, name)))
        return wants

    def _apply(self, step: RecordedStep, contents: RecordContents) -> None:
        known = {one.key: one for one in self.optimizers}
        is_resized = self._resized[step.run, step.plan]
        for key, ranks in step.applied(0 if is_resized else self.group.rank).items():
            if key not in known or self._skips(step, known[key]):
                continue
            one = known[key]
            given = step.with_gradient(one.key)
            keeps = not is_torchs(one.optimizer)  # such a one may keep a gradient as a state
            for name, p in one.params:
                grad = contents.gradients[grad_name(one.key, name)] if name in given else None
                p.grad = grad.clone() if keeps and grad is not None else grad
            rank, first = next(iter(ranks.items()))  # this rank's own, on the same layout
            own = _encoded_groups(step.groups(one.key, rank), first.hyper)
            saved = merged_groups(step, one.key) if is_resized else own
            groups = [(g, g["params"]) for g in one.optimizer.param_groups]
            put_groups(one.key, groups, saved, one.groups, decode_value, as_recorded=True)
            scaler = _ScalerValues(one.optimizer, first.found_inf, first.grad_scale)
            with scaler, without_hooks_before(one.optimizer), _blaming_record(step, key):
                _make_step(one.optimizer, self._blockwise[one.key])

    def _skips(self, step: RecordedStep, one: NamedOptimizer) -> bool:
        """True if this rank's record lacks an optimizer's step that other ranks made, on the recorded
        layout: the places of its gradients hold older bytes."""
        if self._resized[step.run, step.plan] or self.group.rank not in step.ranks_without(one.key):
            return False
        recorded = step.names(one.key, self.group.rank)
        return any(name in recorded for name, _ in one.params)

    def _put_rest(self, step: RecordedStep) -> None:
        """Put buffers and extras back as they were after the step."""
        checkpoint = checkpoint_of(self.log, step)
        live = Prepared(tensors=dict(self.live.tensors))
        kinds = kinds_of(self.state, self.state, Sources())
        plan = Restoring(checkpoint, self.state, kinds, live, self.group, _lenient(self.options))
        plan.is_whole = False
        plan.find()
        with raise_on_all(self.group, step.step):
            plan.check_rules(self._resized[step.run, step.plan])
        read_together(checkpoint.images, plan.wants, self.group if self.group.size > 1 else None)
        with raise_on_all(self.group, step.step):
            plan.put()


@contextmanager
def _tensors_held(optimizers: list[NamedOptimizer]) -> Iterator[None]:
    """A block at whose end hyper-parameters that were tensors are these tensors again, with the new values:
    a script or a captured graph may hold them.  Steps are replayed with values of the recorded type."""
    groups = [group for one in optimizers for group in one.optimizer.param_groups]
    tensors = [(g, k, v) for g in groups for k, v in g.items() if isinstance(v, torch.Tensor)]
    try:
        yield
    finally:
        filled: dict[int, torch.Tensor] = {}
        for group, name, tensor in tensors:
            if fill_in_place(tensor, in_kind_of(tensor, group[name]), filled):
                group[name] = tensor


@contextmanager
def _naming_step(step: RecordedStep) -> Iterator[None]:
    """Add the step to an error of its record."""
    try:
        yield
    except PASSED_OVER as error:
        error.step = step.step
        raise


_OPTIMIZER_ERRORS = (
    ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""What optimizers raise if settings or gradients do not fit."""


@contextmanager
def _blaming_record(step: RecordedStep, key: str) -> Iterator[None]:
    """Raise FormatError if an optimizer cannot make its recorded step; errors of devices and of other ranks
    pass unchanged."""
    try:
        yield
    except _OPTIMIZER_ERRORS as error:
        is_plain = type(error).__module__ == "builtins" and not isinstance(error, OSError)
        if not is_plain or isinstance(error, NotImplementedError):
            raise
        what = f"step {step.step}: {key!r} cannot make its recorded step"
        raise FormatError(f"{what}: {type(error).__name__}: {error}"[:500]) from error


def _late_names(step: RecordedStep) -> set[str] | None:
    """Names of tensors written after the step began, on any rank; None if nothing in it may read any."""
    late = [record.late for _, record in step.records.values() if record.late is not None]
    return set().union(*late) if late else None


def _no_gradient(step: RecordedStep, key: str) -> FormatError:
    """The error for a step that some replicas made, but not the one that records its gradients."""
    ranks = ", ".join(map(str, sorted(step.ranks_without(key))))
    return FormatError(
        f"step {step.step}: ranks {ranks} did not make the step of {key!r}, but record some of its "
        "gradients for the ranks that did"
    )


def _room_for_packed(checkpoint: Checkpoint) -> dict[str, np.ndarray[Any, Any]]:
    """Memory for the packed tensors of a record, by name."""
    return {
        t.name: np.empty(t.shape, np.uint8)
        for t in checkpoint.manifest.tensors
        if t.state == PACKED and t.shape != (0,)
    }


def merged_groups(step: RecordedStep, key: str) -> Any:
    """An optimizer's parameter groups at a step, over all ranks, encoded as extras are."""
    ranks = step.applied()[key]
    each = [_encoded_groups(step.groups(key, r), a.hyper) for r, a in ranks.items()]
    return merge_extras(key, each)


def _lenient(options: RestoreOptions) -> RestoreOptions:
    """The options for a record, which holds gradients and no parameters, so it may lack tensors."""
    return RestoreOptions(strict=False, on_resize=options.on_resize, mesh=options.mesh)


def _encoded_groups(groups: tuple[tuple[str, ...], ...], hyper: tuple[Any, ...]) -> Any:
    """Parameter groups, encoded as extras are."""
    body = [{"params": list(names), "hyper": h} for names, h in zip(groups, hyper)]
    return {"$optimizer": {"groups": body, "state": {}}}


def _make_step(optimizer: Any, blockwise: Blockwise) -> None:
    """Make a step as `optimizer.step()` does, with its hooks; in blocks if that is possible."""

    def make(_: Any) -> None:
        if blockwise.is_possible():
            blockwise.step()
        else:
            unhooked(optimizer)(optimizer)

    if steps_by_itself(optimizer):
        hooked(make)(optimizer)
    else:
        optimizer.step()


class _ScalerValues:
    """Sets, for a block, the attributes by which a GradScaler informs an optimizer's kernel."""

    def __init__(self, optimizer: Any, found_inf: float | None, grad_scale: float | None) -> None:
        self._optimizer = optimizer
        self._values = {"found_inf": found_inf, "grad_scale": grad_scale}

    def __enter__(self) -> None:
        for name, value in self._values.items():
            if value is not None:
                device = self._optimizer.param_groups[0]["params"][0].device
                setattr(self._optimizer, name, torch.tensor(value, device=device))

    def __exit__(self, *_: Any) -> None:
        for name, value in self._values.items():
            if value is not None:
                delattr(self._optimizer, name)
