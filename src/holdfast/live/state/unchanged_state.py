"""A state that does not change at all: the loop trains functional parameters, or binds its names to new
lists and tensors, while the state has the former ones.

Only a state whose changes are certain to be seen is watched: modules, tensors, plain values and containers
that are not large.  Gradients tell that an optimizer will step later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from holdfast.base.errors import HoldfastError
from holdfast.core.format import extras
from holdfast.core.format.unsaved import Unsaved
from holdfast.live.state.modules import module_tensors
from holdfast.live.state.recognising import State, stages
from holdfast.live.state.rng import Rng
from holdfast.live.state.tensor_kinds import PLAIN_TENSORS
from holdfast.live.state.writes import Mark

MAX_COMPARED = 1000
"""Most items of a container that are compared."""


class StateMarks:
    """Marks of all values of a state at one time."""

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
            own = [t for module in modules for t in module_tensors(module)]
            if any(t.grad is not None for t in own if t.requires_grad and t.is_leaf):
                return None
            tensors += own
        elif _size(value) > MAX_COMPARED:
            return None
        else:
            try:
                plain[key] = extras.encode(value, lambda leaf, _: _among(tensors, leaf))
            except HoldfastError:
                return None
    if any(type(t) not in PLAIN_TENSORS or t.layout is not torch.strided for t in tensors):
        return None
    return [Mark.sampled(t) for t in tensors], plain


def _size(value: Any) -> int:
    """Items of a value and of what it holds; more than `MAX_COMPARED` are not counted."""
    if isinstance(value, np.ndarray):
        return int(value.size)
    if not isinstance(value, (Mapping, list, tuple, set, frozenset, deque)):
        return 1
    total = len(value)
    for one in (
        (value.values() if isinstance(value, Mapping) else value) if total <= MAX_COMPARED else ()
    ):
        total += _size(one)
        if total > MAX_COMPARED:
            break
    return total


def _among(tensors: list[torch.Tensor], leaf: Any) -> int:
    """Add a tensor to the others; return its number.  `Unsaved` if it is something else."""
    if not isinstance(leaf, torch.Tensor):
        raise Unsaved("", "an object")
    tensors.append(leaf)
    return len(tensors)
