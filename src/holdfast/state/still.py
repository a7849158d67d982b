"""A state of which nothing changes at all: a loop trains functional parameters, or binds its names to new
lists and tensors, while the state has those that it was made of.

Only a state of which that can be seen for certain is looked at: modules, tensors, plain values and
containers that are not large.  An optimizer of the state may begin later, and gradients tell that one will.
"""

from __future__ import annotations

from typing import Any

import torch

from holdfast.errors import HoldfastError
from holdfast.format import extras
from holdfast.state.live import State, stages, tensors_of
from holdfast.state.outside import held
from holdfast.state.rng import Rng
from holdfast.state.writes import Mark

LARGE = 1000
"""Items of a container that are too many to be compared."""


class Still:
    """All values of a state at one time."""

    def __init__(self, state: State) -> None:
        self._before = _seen(state)

    def is_same(self, state: State) -> bool:
        """True if it is certain that nothing has changed, and no gradients wait to be used."""
        now = None if self._before is None else _seen(state)
        if self._before is None or now is None or now[1] != self._before[1]:
            return False
        (marks, _), (before, _) = now, self._before
        return len(marks) == len(before) and not any(a.differs(b) for a, b in zip(marks, before))


def _seen(state: State) -> tuple[list[Mark], dict[str, Any]] | None:
    """Marks of the tensors of a state, and its plain values; None if it cannot be known what changes."""
    tensors: list[torch.Tensor] = []
    plain: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Rng):
            continue
        modules = stages(value)
        if modules is not None:
            own = [t for module in modules for t in tensors_of(module)]
            if any(t.grad is not None for t in own if t.requires_grad and t.is_leaf):
                return None
            tensors += own
        else:
            tensors += (t for _, t in held(value))
            try:
                plain[key] = extras.encode(value, lambda leaf, _: _of_tensor(leaf))
            except (HoldfastError, extras.Unsaved):
                return None
    if any(isinstance(one, (list, dict)) and len(one) > LARGE for one in plain.values()):
        return None
    return [Mark.sampled(t) for t in tensors], plain


def _of_tensor(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return id(leaf)
    raise extras.Unsaved("", "an object")
