"""The labels that were given to steps on their way: what becomes of them when the save has ended.

They are given by `Checkpointer.pin`, which notes them in `Known.given`; see `checkpoint.notes`.  No save
fails because of them: the user is warned instead.
"""

from __future__ import annotations

from holdfast.base.errors import FormatError, HoldfastError
from holdfast.core.checkpoint import notes
from holdfast.core.format.manifest import Manifest
from holdfast.live.saving.operation import SaveOperation
from holdfast.live.saving.steps import RootSteps


def committed(steps: RootSteps, op: SaveOperation, manifest: Manifest) -> None:
    """Have labels of a step that is committed name it, but for those that were given to another run's.

    Called while `committing` is held.
    """
    try:
        others, given, replaced = _others(steps, op.step), steps.known.given, op.outcome.replaced
        if replaced is not None:
            steps.news += notes.release(steps.store, manifest, replaced, given)
        elif others:
            steps.news += notes.release(steps.store, manifest, None, given, only=others)
        _conclude(steps, op.step, is_saved=True)
    except Exception as error:
        if steps.known.orphans is None and isinstance(error, FormatError):
            steps.known.orphans = {}  # it is told once
        steps.news.append(f"step {op.step} is saved, and what its labels are is not known: {error}")


def left_out(steps: RootSteps, op: SaveOperation) -> None:
    """Have labels of a step that was not saved name what they named before, unless another save of it is on
    its way, or it may be there."""
    step, is_uncertain = op.step, op.outcome.is_uncertain
    try:
        with steps.committing:
            if not (is_uncertain or step in tuple(steps.under_way.values())):
                if not notes.is_there(steps.store, step):
                    _conclude(steps, step, is_saved=False)
    except Exception as error:
        steps.news.append(
            f"step {step} was not saved, and what its labels name is not known: {error}"
        )


def _conclude(steps: RootSteps, step: int, *, is_saved: bool) -> None:
    """Do so with the labels that this process has given to the step; it knows them until it is done."""
    given = [entry for entry in tuple(steps.known.given) if entry[2] == step]
    run = None if steps.claim is None else steps.claim.run
    if labels := [label for label, of, _ in given if of == run]:
        steps.news += notes.conclude(steps.store, step, labels, is_saved=is_saved)
    steps.known.given.difference_update(given)


def _others(steps: RootSteps, step: int) -> list[str]:
    """The labels of a step that were given to saves of it by other runs, which never ended: by this process
    before it went back, or by others, as the first commit of this run finds them."""
    known = steps.known
    run = None if steps.claim is None else steps.claim.run
    mine = [(label, of) for label, of, given_to in tuple(known.given) if given_to == step]
    if known.orphans is None and known.has_notes:
        pinned = notes.read_notes(steps.store).pinned
        there = {s for s in pinned if s != step and notes.is_there(steps.store, s)}
        ours = {label for label, *_ in tuple(known.given)}
        found = {s: [k for k in labels if k not in ours] for s, labels in pinned.items()}
        known.orphans = {s: labels for s, labels in found.items() if s not in there}
    others = (known.orphans or {}).pop(step, [])
    return [*others, *(label for label, of in mine if of != run)]


def adopt(steps: RootSteps, step: int) -> None:
    """Let a step that is saved anew, as it was, have the labels that it was given on its way."""
    try:
        if steps.claim and steps.known.has_notes and not notes.is_there(steps.store, step):
            labels = notes.read_notes(steps.store).pinned.get(step, ())
            steps.known.given |= {(label, steps.claim.run, step) for label in labels}
    except HoldfastError as error:
        steps.news.append(
            f"step {step} is saved anew, and what its labels are is not known: {error}"
        )
