"""Warnings: communication hooks of DistributedDataParallel keep what no `state_dict()` tells.

A hook that compresses what ranks exchange may carry over what it did not send (PowerSGD's error feedback),
and count steps.  That is state of the training: without it a restored run computes other numbers than one
that was not interrupted.  torch leaves it to the script, so all that can be done here is to say it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import warn_user
from holdfast.state.live import State, stages

STATELESS = (type(None), ProcessGroup, weakref.ref)
"""Types of what hooks that carry nothing over are registered with."""
UPCASTING = "torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks"
"""Module with torch's hook that DDP registers itself for `mixed_precision=`, which carries nothing over."""


def tell_hooks(state: State) -> None:
    """HoldfastWarning for each communication hook whose own state is neither a value of the state nor an
    attribute of one."""
    for key, value in state.items():
        for module in stages(value) or ():
            for hook, kept in _hooks(module):
                if _carries_over(kept) and not _has(state, kept):
                    name = getattr(hook, "__qualname__", type(hook).__qualname__)
                    warn_user(
                        f"{key!r}: the communication hook {name} keeps a {type(kept).__qualname__} that "
                        "is not in the state: what it carries over from step to step is not saved, and "
                        "begins anew after a restore. An object with state_dict() and load_state_dict() "
                        "that has it as an attribute can be handed over as a value of the state"
                    )


def _hooks(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """The communication hooks in a module, with what they were registered with."""
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            yield from part._comm_hooks


def _carries_over(kept: Any) -> bool:
    """True if what a hook was registered with may hold something from one step to the next."""
    return not isinstance(kept, STATELESS) and type(kept).__module__ != UPCASTING


def _has(state: State, kept: Any) -> bool:
    return any(
        value is kept or any(one is kept for one in getattr(value, "__dict__", {}).values())
        for value in state.values()
    )
