"""The notes of a run on its steps: labels that keep them, and metrics.  Rank 0 writes for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.base.arguments import step_of
from holdfast.core.checkpoint import notes
from holdfast.core.group import Group
from holdfast.live.saving.steps import RootSteps


class Noting:
    """Notes on the steps of a root that a run holds.  Every method is collective and blocks for a few
    requests to storage; what fails on rank 0 is raised on all ranks."""

    def __init__(
        self,
        group: Group,
        steps: RootSteps,
        coming: Mapping[int, int],
        changed: Callable[[], object] | None,
    ) -> None:
        """`coming`: the run of each step that is being saved.  `changed`: called on rank 0 after each."""
        self._group = group
        self._steps = steps
        self._coming = coming
        self._changed = changed

    def pin(self, step: Any, label: Any) -> None:
        step, label = step_of(step, "Checkpointer.pin"), notes.label_of(label, "Checkpointer.pin")
        if step in self._coming:
            self._steps.known.given.add((label, self._coming[step], step))
        self._on_rank0(lambda: self._pin(step, label))

    def _pin(self, step: int, label: str) -> None:
        steps = self._steps
        with steps.committing:  # so that no save of it ends meanwhile
            notes.pin(steps.store, step, label, coming=tuple(steps.under_way.values()))

    def unpin(self, label: Any) -> None:
        label = notes.label_of(label, "Checkpointer.unpin")
        self._on_rank0(lambda: notes.unpin(self._steps.store, label))

    def measure(self, step: Any, values: Mapping[str, Any]) -> None:
        step = step_of(step, "Checkpointer.metrics")
        checked = notes.values_of(values, "Checkpointer.metrics", "values")
        store, coming = self._steps.store, self._coming
        self._on_rank0(lambda: notes.measure(store, step, checked, coming=coming))

    def _on_rank0(self, work: Callable[[], object]) -> None:
        def done() -> bytes:
            self._steps.known.has_notes = True
            work()
            if self._changed is not None:
                self._changed()
            return b""

        self._group.from_rank0(done)
