"""The notes of a run on its steps: labels and metrics.  Rank 0 writes them for all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from holdfast.base.arguments import named_step_of
from holdfast.base.errors import HoldfastError, NotFound
from holdfast.core.checkpoint import notes
from holdfast.core.checkpoint.names import manifest_key, parse_attempt, read_head
from holdfast.core.group import Group
from holdfast.live.saving.operation import SaveOperation
from holdfast.live.saving.steps import RootSteps


class Noting:
    """Notes on the steps of a run's root.  Every method is collective, and blocks for a few requests to
    storage; an error of rank 0 is raised on all ranks."""

    def __init__(
        self,
        group: Group,
        steps: RootSteps,
        coming: Mapping[int, int],
    ) -> None:
        """`coming`: the run of each step that is being saved."""
        self._group = group
        self._steps = steps
        self._coming = coming

    def pin(self, step: Any, label: Any) -> None:
        call = "Checkpointer.pin"
        named, label = named_step_of(step, call), notes.label_of(label, call)
        self._on_rank0(lambda: self._pin(self._number(named), label))

    def _pin(self, step: int, label: str) -> None:
        steps = self._steps
        notes.read_notes(steps.store)  # damaged notes are an error of this call
        if not steps.labels.give(label, step) or self._is_saved(step):
            with steps.committing:  # so that the step is not deleted meanwhile
                notes.pin(steps.store, step, label)
                steps.labels.forget(label)

    def _number(self, named: int | str) -> int:
        """Return the number of a committed step that a word names.  On rank 0."""
        if isinstance(named, int):
            return named
        from holdfast.core.checkpoint.naming import step_named

        return step_named(self._steps.store, named)

    def _is_saved(self, step: int) -> bool:
        """True if this run has already committed a step of this number."""
        claim = self._steps.claim
        if claim is None:
            return False
        saved = read_head(self._steps.store, step, manifest_key(step))
        return saved is not None and saved.is_proved and saved.run == claim.run

    def unpin(self, label: Any) -> None:
        label = notes.label_of(label, "Checkpointer.unpin")
        self._on_rank0(lambda: self._unpin(label))

    def _unpin(self, label: str) -> None:
        with self._steps.committing:  # so that no commit writes the label meanwhile
            self._steps.labels.forget(label)
            notes.unpin(self._steps.store, label)

    def measure(self, step: Any, values: Mapping[str, Any]) -> None:
        named = named_step_of(step, "Checkpointer.metrics")
        checked = notes.metrics_of(values, "Checkpointer.metrics", "values")
        store, coming = self._steps.store, self._coming

        def work() -> None:
            step = self._number(named)
            try:
                notes.measure(store, step, checked, coming=coming)
            except NotFound as error:
                error.hint = f"{error.hint}; `step({step}, metrics={{...}})` is for one to come"
                raise

        self._on_rank0(work)

    def _on_rank0(self, work: Callable[[], object]) -> None:
        def done() -> bytes:
            self._steps.known.has_notes = True
            work()
            self._steps.noted()
            return b""

        self._group.from_rank0(done)


# -- around a commit, on rank 0 -------------------------------------------------------------------


def write_labels(
    steps: RootSteps, op: SaveOperation, run: int, given: list[str], before: list[str] | None
) -> None:
    """Write the labels that a step, just committed by `run`, was `given`.  Labels that its number had
    `before` stay only if the step replaced a save of this run; otherwise they name a lost state.

    Called while `committing` is held.  Errors are warnings, so that no save fails because of labels.
    """
    step, replaced = op.step, op.outcome.replaced
    former = None if replaced is None else parse_attempt(replaced)
    is_same_run = replaced is not None and (former is None or former[0] == run)
    stale = [] if is_same_run else before
    if not given and stale == []:
        return
    try:
        taken = notes.name_committed(steps.store, step, given, stale)
    except Exception as error:
        if given:
            names = ", ".join(map(repr, given))
            steps.news.append(f"step {step} is saved, but not labelled {names}: {error}")
        else:
            steps.tell_once(
                "labels", f"step {step} is saved, and what its labels are is not known: {error}"
            )
        return
    of = f"step {step}" if former is None else f"step {step} of run {former[0]}"
    steps.news += [
        f"{of} had the label {label!r}, and was saved anew by run {run}: the label is taken away"
        for label in taken
    ]


def adopt_labels(steps: RootSteps, step: int) -> None:
    """Let a step that is about to be saved again, unchanged, keep its labels."""
    with suppress(HoldfastError):  # the commit reports it
        steps.labels.keep(step, notes.read_notes(steps.store).pinned.get(step, []))
