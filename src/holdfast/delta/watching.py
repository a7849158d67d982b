"""What is written apart from the optimizers: buffers, untrained parameters, and weights."""

from __future__ import annotations

import torch

from holdfast.delta.recording import Mark, Steps, buffers, small, untrained, watched
from holdfast.state.live import State


class Watch:
    """Sees writes between two records, as far as they can be seen."""

    def __init__(self) -> None:
        self.changing: set[str] = set()
        """Names of buffers and untrained parameters that have changed before: records hold them."""
        self._untrained: dict[str, torch.Tensor] = {}
        self._marks: dict[str, Mark] = {}
        """What no optimizer changes, as it was at the last record."""
        self._weights: list[torch.Tensor] = []
        self._writes = 0

    def begin(self, state: State, steps: list[Steps]) -> None:
        """Records lead on from the state as it is now."""
        self._untrained = untrained(state)
        self._mark(state)
        self.weights_of(steps)

    def weights_of(self, steps: list[Steps]) -> None:
        """These optimizers' parameters are watched from now on."""
        self._weights = watched(steps)
        self.accept_writes()

    def accept_writes(self) -> None:
        """What was written to weights up to now, the optimizers wrote."""
        self._writes = self._count()

    def is_edited(self) -> bool:
        """Whether somebody else has written to a weight."""
        return self._count() != self._writes

    def tensors(self, state: State) -> dict[str, torch.Tensor]:
        """All that no optimizer changes, by name."""
        return {**self._untrained, **buffers(state)}

    def expect(self, state: State) -> dict[str, torch.Tensor]:
        """What records are to hold of it, as far as is known before they are made."""
        self.changing |= small(buffers(state))
        return {n: t for n, t in self.tensors(state).items() if n in self.changing}

    def changed(self, state: State) -> set[str]:
        """What was written since the last record, as far as that can be known."""
        before = self._marks
        self._mark(state)
        found = {n for n, mark in self._marks.items() if n not in before or mark.differs(before[n])}
        return found | small(buffers(state))

    def _mark(self, state: State) -> None:
        self._marks = {name: Mark.of(t) for name, t in self.tensors(state).items()}

    def _count(self) -> int:
        """Grows with every write to a parameter."""
        return sum(tensor._version for tensor in self._weights)
