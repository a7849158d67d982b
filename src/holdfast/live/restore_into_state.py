"""Restoring a step: saved tensors and extras into live objects, in place, on any layout.

    prepare   materialise modules; find a place for each saved tensor; compare with all ranks, and list
              every difference in one error; open all files
    begin     give optimizers the state tensors that they lack
    read      every rank's boxes together, straight into the live tensors
    put       extras, kind by kind; then frameworks refresh their own weights

A failure before the first byte is read leaves the live state as it was: the step does not fit, is gone, or
lacks a file.  A later failure leaves NaN (`poison`), since there is no second copy of the state: memory for
one is seldom there where states are large, and a rule that spared only small states would hold in every
test of a script and not in its training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from holdfast.base.errors import Deadline, HoldfastError, warn_user
from holdfast.base.events import span
from holdfast.base.gc_pause import uncollected
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.peers import raise_on_all
from holdfast.core.checkpoint.reading import plan_together
from holdfast.core.checkpoint.rows import Want
from holdfast.core.format.manifest import TensorEntry
from holdfast.core.group import Group
from holdfast.core.layout import whole
from holdfast.live.kinds.choosing import kinds_of
from holdfast.live.kinds.restoring import Restoring
from holdfast.live.restore.compare import compare_tensors, judge_together
from holdfast.live.restore.matching_by_order import by_order
from holdfast.live.restore.materialising import materialise, nan_if_it_fails
from holdfast.live.restore.mismatches import Mismatch, Problems, differs
from holdfast.live.restore.one_memory import Aside, read_overlapping, two_values
from holdfast.live.restore.optimizer_states import StateChange
from holdfast.live.restore.targets import LockedBlocks, RestoreOptions, entry_of, target_of
from holdfast.live.sources import Sources
from holdfast.live.state.devices import devices_in, wait_for
from holdfast.live.state.module_wrappers import SECOND, has_wrappers
from holdfast.live.state.named import Prepared
from holdfast.live.state.optimizers import LiveOptimizer
from holdfast.live.state.placed import Placed
from holdfast.live.state.recognising import (
    State,
    check_keys,
    in_order,
    is_of_framework,
    is_stateful,
    modules_in,
    sources_in,
)
from holdfast.live.state.several import normalised
from holdfast.live.state.tensor_kinds import fill_with_nan, writing
from holdfast.live.state.window import wait_for_copies
from holdfast.live.state.writes import count_write

if TYPE_CHECKING:
    from holdfast.live.restore.masters import MasterChange


def restore(checkpoint: Checkpoint, state: State, group: Group, options: RestoreOptions) -> None:
    """Load everything that `state` names from an opened step.  Collective.

    StateMismatch, RuleError, UsageError, and NotFound of a file that is gone before the reading begins
    leave the live tensors untouched.  Corrupt or a store's error may come when some tensors are
    overwritten; then all tensors of the load are poisoned with NaN.  After a Deadline of storage a read may
    still write into them: the hint says so.
    """
    check_keys(state)
    wait_for_copies()
    with _outside_inference_mode(), checkpoint.images.readers.kept():
        _restore(checkpoint, state, group, options)


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    """A block outside of inference mode: an optimizer's next step could not write to states that were made
    in it."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _restore(checkpoint: Checkpoint, state: State, group: Group, options: RestoreOptions) -> None:
    with nan_if_it_fails(state):
        plan = _prepare(checkpoint, state, group, options)
    try:
        with raise_on_all(group, checkpoint.step):
            plan.begin()
        with span("restore.read", step=checkpoint.step):
            _in_turn(plan)
        with raise_on_all(group, checkpoint.step):
            for aside in plan.asides.values():
                aside.put()
            for put in plan.live.puts:
                put()
            plan.restoring.put()
            _hand_over(plan.restoring.state, state)
            wait_for(devices_in(plan.live))  # for what was read on the side, and is let go of
        with raise_on_all(group, checkpoint.step):
            for source in plan.sources.of_frameworks():
                source.refresh()
    except BaseException as error:  # a KeyboardInterrupt, too: a notebook goes on
        poison(plan.live, plan.sources)
        _tell_left_behind(error)
        raise
    finally:
        # filling the tensors' memory has counted no writes
        count_write([t.source for t in plan.live.tensors.values()])


def _in_turn(plan: _Plan) -> None:
    """Read after all work that the training has given to devices, and before its next: the threads that
    read have streams of their own."""
    devices = devices_in(plan.live)
    wait_for(devices)
    plan.read()
    wait_for(devices)


def _tell_left_behind(error: BaseException) -> None:
    """Say in a Deadline's hint that an unanswered read may still write into the live memory, which the
    kernel does not give back."""
    if isinstance(error, HoldfastError) and isinstance(error.__cause__ or error, Deadline):
        late = (
            "throw the live state away: a read that was given up may still write into it, over the NaN "
            "that are in it now"
        )
        error.hint = f"{error.hint}; {late}" if error.hint else late


def poison(live: Prepared, sources: Sources) -> None:
    """Fill float and complex tensors with NaN: a half-loaded state must not be mistaken for a good one."""
    for t in live.tensors.values():
        for part in t.parts:
            fill_with_nan(part.local)
    if any(t.state == "param" for t in live.tensors.values()):
        for source in sources.of_frameworks():
            source.poison()


@dataclass
class _Plan:
    restoring: Restoring
    begin: Callable[[], None]
    """Makes the live state ready to be read into: its first change."""
    read: Callable[[], None]
    asides: dict[int, Aside]
    sources: Sources

    @property
    def live(self) -> Prepared:
        return self.restoring.live


def _prepare(checkpoint: Checkpoint, given: State, group: Group, options: RestoreOptions) -> _Plan:
    """Find places, compare, and open all files.  A failure is the same on all ranks, and leaves the live
    state as it was.  Collective."""
    state, live, problems = given, Prepared(), Problems()
    changes: list[StateChange | MasterChange] = []
    try:
        state = in_order(normalised(state))
        materialise(module for _, module in modules_in(state))
        state = _arranged(checkpoint, state)
        with uncollected():
            sources = sources_in(state)
            kinds = kinds_of(state, state, sources)
            optimizers = [one for kind in kinds.values() for one in kind.optimizers(state)]
            checkpoint = _under_live_names(checkpoint, state, optimizers)
            checkpoint = _with_own(checkpoint, optimizers, group)
            checkpoint, unproved = by_order(checkpoint, optimizers, state, options)
            live = Prepared(saved=partial(entry_of, checkpoint))
            restoring = Restoring(checkpoint, state, kinds, live, group, options)
            changes = [change for kind in kinds.values() for change in kind.place(restoring)]
            problems = compare_tensors(checkpoint, live, options)
            _tell_misfits(problems, live, options)
            restoring.find()
        problems.add(restoring.problems)
        problems.found += unproved
        asides = {} if problems.found else read_overlapping(checkpoint, live)
        arrays = restoring.claims.arrays
        problems.found += [] if problems.found else two_values(checkpoint, live, arrays)
    except Exception as error:
        problems.found.append(Mismatch("said", "", str(error)))
        problems.found += _read_numbers(checkpoint, state, changes, group, is_known=False)
        judge_together(checkpoint, live, problems, error, group, options)
        raise
    problems.found += _read_numbers(checkpoint, state, changes, group)
    is_resized = judge_together(checkpoint, live, problems, None, group, options)
    misfits = [one.key for one in live.misfits if not one.is_idle]
    options.kept.extend([*problems.missing, *misfits])
    with raise_on_all(group, checkpoint.step):
        restoring.check_rules(is_resized)
    with raise_on_all(group, checkpoint.step):
        wants, padded = _wanted(checkpoint, live, asides)
    peers = group if group.size > 1 else None
    if devices := devices_in(live):
        checkpoint.images.block_memory = partial(LockedBlocks, devices)
    read = plan_together(checkpoint.images, wants + restoring.wants, peers)
    return _Plan(restoring, partial(_begin, changes, padded), read, asides, sources)


def _begin(changes: list[StateChange | MasterChange], padded: list[torch.Tensor]) -> None:
    """Give optimizers the states that they lack, and zero rows of padding."""
    for change in changes:
        change.apply()
    for local in padded:
        with writing(local):
            local.zero_()


def _arranged(checkpoint: Checkpoint, state: State) -> State:
    """The state, with objects that a trainer knows by number under their saved keys."""
    for key, value in state.items():
        arrange = getattr(type(value), "_holdfast_arranged", None)
        if arrange is not None and key in checkpoint.manifest.extras:
            state = in_order(arrange(value, checkpoint.manifest.extras[key], state))
    return state


def _under_live_names(
    checkpoint: Checkpoint, state: State, optimizers: Sequence[LiveOptimizer]
) -> Checkpoint:
    """The checkpoint under the live names, if wrappers may have been part of names when it was saved."""
    modules = [*modules_in(state)]
    known = (*checkpoint.manifest.by_name, *checkpoint.manifest.aliases)
    of_fabric = any(f".{SECOND}." in name for name in known)
    if not of_fabric and not any(has_wrappers(module) for _, module in modules):
        return checkpoint
    from holdfast.live.restore.former_names import under_live_names

    return under_live_names(checkpoint, modules, optimizers, of_fabric=of_fabric)


def _with_own(
    checkpoint: Checkpoint, optimizers: Sequence[LiveOptimizer], group: Group
) -> Checkpoint:
    """The checkpoint with this rank's values of optimizers, if each rank saved its own."""
    keys = [one.key for one in optimizers if one.key in checkpoint.manifest.per_rank]
    if not keys:
        return checkpoint
    from holdfast.live.restore.values_per_rank import with_own

    return with_own(checkpoint, keys, group)


def _read_numbers(
    checkpoint: Checkpoint,
    state: State,
    changes: list[StateChange | MasterChange],
    group: Group,
    *,
    is_known: bool = True,
) -> list[Mismatch]:
    """Read the numbers that masters of a framework share; return those that masters cannot take.
    Collective.  `is_known`: false where preparing has failed; this rank then reads nothing."""
    if not is_of_framework(state):
        return []
    from holdfast.live.restore.masters import MasterChange, read_numbers

    masters = [change for change in changes if isinstance(change, MasterChange)]
    with raise_on_all(group, checkpoint.step):
        read_numbers(checkpoint, masters if is_known else [])
    return [one for change in masters for one in change.problems]


def _wanted(
    checkpoint: Checkpoint, live: Prepared, asides: dict[int, Aside]
) -> tuple[list[Want], list[torch.Tensor]]:
    """The reads that fill this rank's part of every live tensor, and the parts that are zeroed before them
    since their rows of padding were not saved."""
    find = checkpoint.manifest.find
    wants: list[Want] = []
    padded: list[torch.Tensor] = []
    with uncollected():
        for name, t in live.tensors.items():
            if (index := find(name)) is None:
                continue
            entry = checkpoint.manifest.tensors[index]
            for part in t.parts:
                if part.box.size and entry.shape == part.shape:
                    local = asides[id(part)].values if id(part) in asides else part.local
                    wants.append(Want(index, part.box, target_of(local, entry.dtype, name)))
                elif part.box.size:
                    padded.append(part.local)
                    wants += _unpadded(index, entry, part)
    return wants, padded


def _unpadded(index: int, entry: TensorEntry, part: Placed) -> list[Want]:
    """The read of the saved rows of a padded part; none if all of it is padding."""
    box = part.box & whole(entry.shape)
    if box is None:
        return []
    inside = part.local[box.within(part.box.start)]
    return [Want(index, box, target_of(inside, entry.dtype, entry.name))]


def _tell_misfits(problems: Problems, live: Prepared, options: RestoreOptions) -> None:
    """Tell of saved states that an optimizer cannot use: misfits, which a load without `strict` leaves out,
    and idle states, which are put back and not looked at."""
    if options.strict:
        problems.found += [differs(one.key, one.why) for one in live.misfits if not one.is_idle]
    for is_idle, what in (
        (False, "states of another optimizer are left out"),
        (True, "states are put back that their optimizer has no use for"),
    ):
        said = [f"{one.key}: {one.why}" for one in live.misfits if one.is_idle is is_idle]
        if said and (is_idle or not options.strict):
            warn_user(f"{what}: {'; '.join(said)}")


def _hand_over(seen: State, given: State) -> None:
    """Put replaced values into the user's own state.

    Objects with a state_dict() stay under the user's keys, whatever key they were loaded under."""
    if seen is not given:
        given |= {key: value for key, value in seen.items() if not is_stateful(value)}
