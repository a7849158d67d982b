"""Words that name a step of a root: a label, `best`, `newest`.

    newest     the step that was committed last
    LABEL      the step with this label (`notes`)
    best       the step with the label `best`; without one, the first by `Keep(best=...)`

The rule for `best` is that of the run that has claimed the root last: its claim states metric and
direction.

While a run saves there, a word may name another step a moment later, and the first one may be deleted
(`read_named`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from holdfast.base.errors import NotFound
from holdfast.base.events import emit
from holdfast.core.checkpoint.claiming import newest_claim
from holdfast.core.checkpoint.names import (
    MOST_TRIES,
    RootKeys,
    read_manifest,
    seen,
    steps_text,
)
from holdfast.core.checkpoint.notes import NEWEST, Notes, notes_among
from holdfast.core.checkpoint.pruning import best_first
from holdfast.core.checkpoint.unproved import newest, newest_manifest
from holdfast.core.format.manifest import Manifest
from holdfast.core.store import Store

BEST = "best"
_MOST = 10
"""Most labels that a message lists."""
_T = TypeVar("_T")
_Step = TypeVar("_Step", int, int | None)


def step_named(store: Store, word: str) -> int:
    """The number of the step that a word names.  NotFound lists the labels that exist; FormatError for
    damaged notes; NotRecoverable for `newest` of a root without steps."""
    if word == NEWEST:
        return newest(store)
    keys = seen(store) if word == BEST else RootKeys(store)
    notes = notes_among(keys)
    step = notes.live_labels.get(word)
    if step is None and word == BEST:
        step = _best(keys, notes)
    if step is None:
        raise NotFound(
            f"no step of {store.url} has the label {word!r}" + (_no_rule(store) * (word == BEST)),
            hint=f"labels there: {labels_text(notes)}; steps there: {steps_text([*keys.manifests])}",
        )
    return step


def read_named(step: _Step, again: Callable[[], _Step], read: Callable[[_Step], _T]) -> _T:
    """Return `read(step)`, of a step that a word names.  If it is deleted meanwhile and the word names
    another step by then, as `again` tells, that one is read.  NotFound if the word names the same."""
    for _ in range(MOST_TRIES):
        try:
            return read(step)
        except NotFound as error:
            now = again()
            if now == step:
                raise
            emit("load.again", step=step, error=str(error))
            step = now
    return read(step)


def manifest_named(store: Store, word: str) -> Manifest:
    """The manifest of the step that a word names.  NotFound, NotRecoverable, as `step_named`."""
    if word == NEWEST:
        return newest_manifest(store)
    step = step_named(store, word)
    return read_named(step, lambda: step_named(store, word), lambda n: read_manifest(store, n))


def _best(keys: RootKeys, notes: Notes) -> int | None:
    """The best step by the rule of the run that has claimed the root last; None if there is none."""
    claim = newest_claim(keys.store)
    if claim is None or claim.best is None:
        return None
    saved = [one for one in keys.saved if one.is_proved]
    best, _ = best_first(keys, notes, *claim.best, saved)
    return best[0] if best else None


def _no_rule(store: Store) -> str:
    claim = newest_claim(store)
    if claim is None or claim.best is None:
        return ", and its last run keeps none by Keep(best=...)"
    return f", and none has the metric {claim.best[0]!r}, by which its last run keeps the best"


def labels_text(notes: Notes) -> str:
    """List the labels of a root for a message."""
    labels = sorted(notes.live_labels.items())
    text = ", ".join(f"{label!r} (step {step})" for label, step in labels[:_MOST])
    return text + (f", ... {len(labels)} in all" if len(labels) > _MOST else "") or "none"
