"""States of an optimizer that share memory with each other.

    state["average"] = state["momentum"]          one tensor under two names
    state["step"] = self.step                     one tensor for all parameters

A checkpoint has each state under its own name, and an optimizer without states gets each in memory of its
own. From then on a write to one does not change the other, and the training differs.  Whether states are
written at all is unknown, so the save warns and does not refuse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.base.errors import warn_user
from holdfast.base.text import listed
from holdfast.live.state.optimizer_wrappers import params_of
from holdfast.live.state.optimizers import tensors_in
from holdfast.live.state.placed import local_of
from holdfast.live.state.several import holder
from holdfast.live.state.tensor_kinds import PLAIN_TENSORS

TABLES = ("qmap1", "qmap2")
"""States of bitsandbytes' 8-bit optimizers that all parameters share, and that nobody writes to."""
StorageSpan = tuple[int, int, int, str]
"""Addresses where the memory of a state begins and ends, the number of the state, and its name."""


def tell_shared(key: str, optimizer: Optimizer, names: Mapping[int, list[str]]) -> None:
    """HoldfastWarning for states of which one lies in the memory of another.  `names`: of parameters, by
    id."""
    spans = sorted(_spans(optimizer, names))
    pairs = [sorted([a[2:], b[2:]]) for a, b in pairwise(spans) if b[0] < a[1]]
    shared = [f"{one} and {other}" for (_, one), (_, other) in sorted(pairs)]
    if shared:
        warn_user(
            f"{key!r}: states of {type(optimizer).__name__} share memory: {listed(shared, 4)}. "
            "An optimizer without states that is restored has them in memory of their own, and "
            "what is written to one is not in the other: have such a state once, in the parameter group "
            "or, by a name, in optimizer.state"
        )


def _spans(optimizer: Any, names: Mapping[int, list[str]]) -> Iterator[StorageSpan]:
    """Yield the spans of states, and of tensors in dicts and lists that are states, with elements in memory
    that torch knows; of one with gaps only the first element counts, for others may lie in the gaps."""
    number = 0
    for i, p in enumerate(params_of(optimizer)):
        inner = holder(optimizer, p)
        states = inner.state.get(p, {}) if inner is not None else {}
        for state, value in tensors_in(states) if isinstance(states, dict) else ():
            if not _is_in_memory(value) or _is_table(inner, state):
                continue
            local = local_of(value)
            start, elements = local.data_ptr(), local.numel() if local.is_contiguous() else 1
            if start and local.numel():
                number += 1
                name = names.get(id(p), [f"parameter {i}"])[0]
                yield start, start + elements * local.element_size(), number, f"{name}.{state}"


def _is_table(optimizer: Any, state: str) -> bool:
    """True if a state of an optimizer is one of bitsandbytes' `TABLES`."""
    classes = type(optimizer).__mro__
    return state in TABLES and any(c.__module__.startswith("bitsandbytes.") for c in classes)


def _is_in_memory(value: Any) -> bool:
    return type(value) in PLAIN_TENSORS | {DTensor} and value.layout is torch.strided
