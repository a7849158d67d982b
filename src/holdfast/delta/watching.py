"""What is written apart from the optimizers: buffers, untrained parameters, weights and their states."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.delta.recording import Mark, buffers, small, untrained
from holdfast.state.live import State
from holdfast.state.wrapped import Seen, stepping


class Watch:
    """Sees writes between two records, as far as they can be seen."""

    def __init__(self) -> None:
        self.changing: set[str] = set()
        """Names of buffers and untrained parameters that have changed before: records hold them."""
        self._untrained: dict[str, torch.Tensor] = {}
        self._marks: dict[str, Mark] = {}
        """What no optimizer changes, as it was at the last record."""
        self._optimizers: list[Optimizer] = []
        self._sizes: list[int] = []
        """Of their parameter groups."""
        self._seen = Seen([])
        """What they have, as they left it."""

    def begin(self, state: State) -> None:
        """Records lead on from the state as it is now."""
        self._untrained = untrained(state)
        self._mark(state)
        self._optimizers = [v for v in state.values() if isinstance(v, Optimizer)]
        self.accept_writes()

    def accept_writes(self) -> None:
        """What was written to weights and states up to now, the optimizers wrote."""
        self._sizes, self._seen = self._look()

    def is_edited(self) -> bool:
        """Whether somebody else has written to a weight or to a state, or an optimizer has others."""
        return self._look() != (self._sizes, self._seen)

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

    def _look(self) -> tuple[list[int], Seen]:
        groups = [g["params"] for o in self._optimizers for g in o.param_groups]
        values: list[Any] = [p for params in groups for p in params]
        for optimizer in self._optimizers:
            for states in stepping(optimizer).state.values():
                values += states.values() if isinstance(states, dict) else [states]
        return [len(params) for params in groups], Seen(values)
