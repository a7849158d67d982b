"""Restoring: saved tensors and extras into live objects, in place, whatever their layout.

In five steps, each the same on every rank: materialise what is on the meta device; give optimizers the
state tensors that were saved; compare names, shapes and dtypes over all ranks (every difference is listed
in one error); read every rank's boxes together, straight into the live tensors; put the extras back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from holdfast.checkpoint.opened import Checkpoint
from holdfast.checkpoint.peers import agree
from holdfast.checkpoint.rows import Want
from holdfast.checkpoint.sharing import read_together
from holdfast.events import span
from holdfast.group import Group
from holdfast.state.compare import Problems, compare, judge_together
from holdfast.state.live import Live, State, check_keys, stages
from holdfast.state.putback import Extras
from holdfast.state.targets import Change, Options, is_known, materialise, target_of, targets


def restore(checkpoint: Checkpoint, state: State, group: Group, options: Options) -> None:
    """Load everything that `state` names from an opened step.  Collective.

    StateMismatch, RuleError and UsageError leave the live tensors untouched.  Corrupt or a store's
    error may come when some are already overwritten; then what was to be loaded is poisoned with NaN.
    """
    check_keys(state)
    prepared = _prepare(checkpoint, state, group, options)
    try:
        with span("restore.read", step=checkpoint.step):
            read_together(checkpoint.files, prepared.wants, group if group.size > 1 else None)
        with alike(group, checkpoint.step):
            prepared.put_extras()
    except Exception:
        poison(prepared.live)
        raise


@contextmanager
def alike(group: Group, step: int) -> Iterator[None]:
    """What fails in this block on one rank fails on all.  Collective."""
    error: Exception | None = None
    try:
        yield
    except Exception as failed:
        error = failed
    if group.size > 1:
        agree(group, error, step)
    elif error is not None:
        raise error


def poison(live: Live) -> None:
    """A half-loaded state must not be mistaken for a good one."""
    for t in live.tensors.values():
        local = t.placed.local
        if local.is_floating_point() and local.element_size() > 1:
            with torch.no_grad():
                local.fill_(float("nan"))


@dataclass
class _Prepared:
    live: Live
    wants: list[Want]
    put_extras: Callable[[], None]


def _prepare(checkpoint: Checkpoint, state: State, group: Group, options: Options) -> _Prepared:
    error: Exception | None = None
    live, problems = Live(), Problems()
    changes: list[Change] = []
    plan: Extras | None = None
    try:
        for value in state.values():
            for module in stages(value) or ():
                materialise(module)
        live, changes = targets(checkpoint, state, options)
        problems = compare(checkpoint, live, state, options)
        plan = Extras(checkpoint, state, live, group, options)
        problems.lines += plan.problems
    except Exception as failed:
        error = failed
        problems.lines.append(str(failed))
    changed = judge_together(checkpoint, live, problems, error, group, options)
    assert plan is not None
    plan.resized = changed
    with alike(group, checkpoint.step):
        plan.check_rules()
    with alike(group, checkpoint.step):
        for change in changes:
            change.apply()
    wants = [
        Want(
            checkpoint.index(name),
            t.placed.box,
            target_of(t.placed.local, _saved(checkpoint, name)),
        )
        for name, t in live.tensors.items()
        if is_known(checkpoint, name) and t.placed.box.size
    ]
    wants += plan.wants
    return _Prepared(live, wants, plan.put)


def _saved(checkpoint: Checkpoint, name: str) -> str:
    return checkpoint.manifest.tensors[checkpoint.index(name)].dtype
