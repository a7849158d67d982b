"""Finds writes to weights and optimizer states from outside, to buffers and to untrained parameters."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from holdfast.live.state.arrays import raw_array
from holdfast.live.state.customised import customised, own_tensors
from holdfast.live.state.ignoring import trainable_marks
from holdfast.live.state.modules import named_buffers, named_parameters
from holdfast.live.state.optimizer_wrappers import stepping
from holdfast.live.state.optimizers import tensors_in
from holdfast.live.state.placed import memory_of
from holdfast.live.state.recognising import State, is_plain, modules_in
from holdfast.live.state.tensor_kinds import PLAIN_TENSORS
from holdfast.live.state.trainable import frozen_in
from holdfast.live.state.writes import Mark, Marks, corner, count_and_address

SMALL_BYTES = 1 << 20
MOST_SEEN = 64
"""Number of weights of an optimizer, at most, whose elements are compared at each step."""

Look = tuple[list[int], Marks, list[bytes]]
"""An optimizer as it was seen: sizes of its groups, marks of its weights and states, some elements."""


def untrained(state: State) -> dict[str, torch.Tensor]:
    """Parameters that no optimizer of the state has, by name: frozen ones, or an average of the weights."""
    trained = {
        id(p)
        for value in state.values()
        if isinstance(value, Optimizer)
        for group in value.param_groups
        for p in group["params"]
    }
    others: dict[str, torch.Tensor] = {}
    for key, module in modules_in(state):
        if trainable_marks:
            trained |= {id(p) for p in frozen_in(module).values()}  # no step has them, either
        for name, p in named_parameters(module):
            if id(p) not in trained:
                others.setdefault(f"{key}.{name}", p)
    return others


def buffers(state: State) -> dict[str, torch.Tensor]:
    """Buffers and tensors of the user's own, by name."""
    named: dict[str, torch.Tensor] = {}
    for key, module in modules_in(state):
        for name, buffer in named_buffers(module):
            named.setdefault(f"{key}.{name}", buffer)
        for name, tensor in own_tensors(customised(key, module)):
            named.setdefault(f"{key}.{name}", tensor)
    for key, value in state.items():
        if is_plain(value):
            for path, tensor in tensors_in(value):
                named[f"{key}.{path}" if path else key] = tensor
    return named


def small(tensors: dict[str, torch.Tensor]) -> set[str]:
    """Names of small tensors, which every record holds: torch does not count the writes of batch norm."""
    return {n for n, t in tensors.items() if t.numel() * t.element_size() <= SMALL_BYTES}


class HostElements:
    """A few elements of an optimizer's weights on the host, of at most `MOST_SEEN` weights: they show
    writes that torch does not count."""

    def __init__(self) -> None:
        self._views: dict[int, tuple[int, np.ndarray[Any, Any]]] = {}
        """Address of each weight, and a view of its elements, by number of the weight."""

    def look(self, weights: list[torch.Tensor]) -> list[bytes]:
        """Return the elements as they are now."""
        found = []
        for number in range(0, len(weights), -(-len(weights) // MOST_SEEN) or 1):
            local = memory_of(weights[number])
            if type(local) not in PLAIN_TENSORS or not local.is_cpu or not local.numel():
                continue
            known = self._views.get(number)
            if known is None or known[0] != local.data_ptr():
                known = local.data_ptr(), corner(raw_array(local))  # the view keeps that memory
                self._views[number] = known
            found.append(known[1].tobytes())
        return found


class Watch:
    """Finds writes between two records, as far as they can be seen."""

    def __init__(self) -> None:
        self.changing: set[str] = set()
        """Names of buffers and untrained parameters that have changed before: records hold them."""
        self._untrained: dict[str, torch.Tensor] = {}
        self._marks: dict[str, Mark] = {}
        """Marks of tensors that no optimizer changes, at the last record, by name."""
        self._optimizers: dict[str, Optimizer] = {}
        self._seen: dict[str, Look] = {}
        """Each optimizer as its last step left it."""
        self._elements: defaultdict[str, HostElements] = defaultdict(HostElements)
        self._is_shared = False
        """True if two of the optimizers train one parameter."""

    def begin(self, state: State) -> None:
        """Begin to watch: records lead on from the state as it is now."""
        self._untrained = untrained(state)
        self._elements.clear()
        self._mark(state)
        self._optimizers = {k: v for k, v in state.items() if isinstance(v, Optimizer)}
        params = [
            id(p) for o in self._optimizers.values() for g in o.param_groups for p in g["params"]
        ]
        self._is_shared = len(params) > len(set(params))
        self.accept_writes()

    def accept_writes(self, key: str | None = None) -> None:
        """Take writes up to now to weights and states of an optimizer (None: of all) as its own."""
        for name in self._of(key):
            self._seen[name] = self._look(name)

    def is_edited(self, key: str | None = None) -> bool:
        """True if something else has written to weights or states of an optimizer (None: of any), or has
        replaced them."""
        return any(self._look(name) != self._seen[name] for name in self._of(key))

    def _of(self, key: str | None) -> list[str]:
        return list(self._optimizers) if key is None or self._is_shared else [key]

    def tensors(self, state: State) -> dict[str, torch.Tensor]:
        """All tensors that no optimizer changes, by name."""
        return {**self._untrained, **buffers(state)}

    def expect(self, state: State) -> dict[str, torch.Tensor]:
        """Those of `tensors` that records will hold, as far as is known beforehand."""
        self.changing |= small(buffers(state))
        return {n: t for n, t in self.tensors(state).items() if n in self.changing}

    def learn(self, names: set[str], state: State) -> None:
        """Note that tensors of these names changed in earlier steps."""
        self.changing |= names & {**untrained(state), **buffers(state)}.keys()

    def changed(self, state: State) -> set[str]:
        """Names of tensors written since the last record, as far as can be seen, and of small buffers."""
        before = self._marks
        self._mark(state)
        written = {
            n for n, mark in self._marks.items() if n not in before or mark.differs(before[n])
        }
        return written | small(buffers(state))

    def versions(self, state: State) -> dict[str, tuple[int, int]]:
        """Count of writes, and address, of each tensor that no optimizer changes, by name."""
        return {name: count_and_address(t) for name, t in self.tensors(state).items()}

    def written_since(self, before: dict[str, tuple[int, int]], state: State) -> tuple[str, ...]:
        """Names of tensors whose `versions` are others than `before`."""
        now = self.versions(state)
        return tuple(sorted(name for name, v in now.items() if before.get(name) != v))

    def _mark(self, state: State) -> None:
        self._marks = {name: Mark.sampled(t) for name, t in self.tensors(state).items()}

    def _look(self, name: str) -> Look:
        optimizer = self._optimizers[name]
        groups = [g["params"] for g in optimizer.param_groups]
        weights = [p for params in groups for p in params]
        values: list[Any] = [*weights]
        for states in stepping(optimizer).state.values():
            values += states.values() if isinstance(states, dict) else [states]
        elements = self._elements[name].look(weights)
        return [len(params) for params in groups], Marks(values), elements
