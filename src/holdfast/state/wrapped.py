"""Optimizers around other optimizers: which of them has the state of a parameter.

`torch.distributed.optim.ZeroRedundancyOptimizer` (ZeRO-1 under DDP) serves all parameters, but an inner
optimizer steps those of this rank alone and has their state.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.errors import UsageError

ELEMENTWISE = frozenset(
    [
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    ]
)
"""Optimizers of torch that treat each element by itself, so that cuts do not matter."""


def writes(tensors: Iterable[torch.Tensor]) -> int:
    """Grows with every write to one of them, but for those by way of `.data`."""
    total = 0
    for tensor in tensors:
        total += tensor._version
        if isinstance(tensor, DTensor):
            total += tensor._local_tensor._version
    return total


def is_zero1(optimizer: Any) -> bool:
    """Whether it is torch's ZeroRedundancyOptimizer."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def stepping(optimizer: Optimizer) -> Optimizer:
    """The optimizer that makes the steps, and has the states."""
    return optimizer.optim if is_zero1(optimizer) else optimizer


def holder(optimizer: Optimizer, p: torch.Tensor) -> Optimizer | None:
    """The optimizer that has the state of `p`; None if another rank has it."""
    if is_zero1(optimizer) and optimizer._param_to_rank.get(p) != optimizer.rank:
        return None
    return stepping(optimizer)


def check_wrapped(key: str, optimizer: Any, state: dict[str, Any]) -> None:
    """UsageError for an optimizer inside another one whose state nobody would save."""
    if is_zero1(optimizer):
        if optimizer._overlap_with_ddp:
            raise UsageError(
                f"{key!r}: ZeroRedundancyOptimizer(overlap_with_ddp=True) is not supported",
                hint="build it with overlap_with_ddp=False",
            )
        return
    if not isinstance(optimizer, Optimizer):
        return
    for name, inner in vars(optimizer).items():
        if not isinstance(inner, Optimizer) or inner.state is optimizer.state:
            continue
        if not any(value is inner for value in state.values()):
            raise UsageError(
                f"{key!r}: a {type(optimizer).__name__} around a {type(inner).__name__} "
                f"(.{name}), whose state would be lost",
                hint=f"hand that over, too: {{{key!r}: optimizer, '{key}_inner': optimizer.{name}}}",
            )
