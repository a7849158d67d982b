"""The labels of a root that were given to steps on their way: what becomes of them when the save has ended.

They are given by `Checkpointer.pin`, which notes them in `RootSteps.pinned`; see `checkpoint.notes`.
"""

from __future__ import annotations

from holdfast.checkpoint import notes
from holdfast.format.manifest import Manifest
from holdfast.saving.operation import SaveOperation
from holdfast.saving.steps import RootSteps


def committed(steps: RootSteps, op: SaveOperation, manifest: Manifest) -> list[str]:
    """Have labels of a step that is committed name it, but for those that were given to another run's.
    Return what the user is to be told."""
    news = notes.release(steps.store, manifest, op.outcome.replaced, steps.pinned)
    if given := _given(steps, op.step):
        news += notes.conclude(steps.store, op.step, given, is_saved=True)
    return news


def left_out(steps: RootSteps, step: int) -> list[str]:
    """Have labels of a step that was not saved name what they named before."""
    given = _given(steps, step)
    return notes.conclude(steps.store, step, given, is_saved=False) if given else []


def adopt(steps: RootSteps, step: int) -> None:
    """Let a step that is saved anew, as it was, have the labels that it was given on its way."""
    if steps.claim and steps.known.has_notes and not notes.is_there(steps.store, step):
        labels = notes.read_notes(steps.store).pinned.get(step, ())
        steps.pinned |= {(label, steps.claim.run, step) for label in labels}


def _given(steps: RootSteps, step: int) -> list[str]:
    """The labels that this process has given to a step while it was on its way."""
    run = None if steps.claim is None else steps.claim.run
    return [label for label, *of in steps.pinned if of == [run, step]]
