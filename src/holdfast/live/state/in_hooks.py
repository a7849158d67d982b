"""State of the training that hangs at hooks, where no `state_dict()` tells of it.

*Communication hooks* of DistributedDataParallel that compress what ranks exchange may carry over what they
did not send (PowerSGD's error feedback), and count steps.  Without that a restored run computes other
numbers than one that was not interrupted.  torch leaves it to the script, so all that can be done here is
to say it.

*Optimizers that step in backward*, while the gradients come:

    by = {p: AdamW([p]) for p in model.parameters()}

    def step_now(p):                    # PyTorch's tutorial on fusing the step into backward
        by[p].step()
        by[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_now)

Such optimizers have moments as any other, and hang at the parameters: a script that hands over its model
alone loses them.  The code of a hook is never inspected.  The facts:

* `_apply_optimizer_in_backward` of torch leaves its optimizers in an attribute of the parameter;
* a `Checkpointer` sees every optimizer step, and torch says of each whether it is made in a backward pass
  (`StepCounts`).  So an optimizer counts from its first step on;
* `holdfast.save` has seen no step, nor has the first save of a `Checkpointer` that was made after them.
  There a parameter with such a hook that no optimizer of the state has is told.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from holdfast.base.errors import UsageError, need, warn_user
from holdfast.base.text import listed
from holdfast.live.state.optimizer_wrappers import params_of, shown_optimizer, stepping
from holdfast.live.state.recognising import State, is_of_framework, modules_in, parameters_in
from holdfast.live.state.several import (
    MAX_NAMED,
    combined_parts,
    inner_optimizers,
    normalised,
    optimizers_within,
)

# -- communication hooks -----------------------------------------------------------------------------


STATELESS = (type(None), ProcessGroup, weakref.ref)
"""Types of what hooks that carry nothing over are registered with."""
UPCASTING = "torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks"
"""Module with torch's hook that DDP registers itself for `mixed_precision=`, which carries nothing over."""


def tell_hooks(state: State) -> None:
    """HoldfastWarning for each communication hook whose state is neither a value of the state nor an
    attribute of a value."""
    for key, module in modules_in(state):
        for hook, kept in _communication_hooks(module):
            if _carries_over(kept) and not _has(state, kept):
                name = getattr(hook, "__qualname__", type(hook).__qualname__)
                warn_user(
                    f"{key!r}: the communication hook {name} keeps a {type(kept).__qualname__} that "
                    "is not in the state: what it carries over from step to step is not saved, and "
                    "begins anew after a restore. An object with state_dict() and load_state_dict() "
                    "that has it as an attribute can be handed over as a value of the state"
                )


def _communication_hooks(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """The communication hooks in a module, with what they were registered with."""
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            yield from need("torch", part, "_comm_hooks")[0]


def _carries_over(kept: Any) -> bool:
    """True if what a hook was registered with may hold something from one step to the next."""
    return not isinstance(kept, STATELESS) and type(kept).__module__ != UPCASTING


def _has(state: State, kept: Any) -> bool:
    return any(
        value is kept or any(one is kept for one in getattr(value, "__dict__", {}).values())
        for value in state.values()
    )


# -- optimizers that step in backward ----------------------------------------------------------------


def check_in_backward(state: State, stepped: Iterable[Any] = ()) -> None:
    """UsageError for optimizers that step in backward and are not in the state, where a module with their
    parameters is.  `stepped`: those that were seen to step there."""
    parameters = list(parameters_in(state))
    hung = [one for *_, p in parameters for one in getattr(p, "_in_backward_optimizers", ())]
    candidates = {id(one): one for one in (*hung, *stepped)}
    if not candidates:
        return
    known = set(map(id, _optimizers_of(state)))
    owners: dict[int, list[str]] = {}
    for one in candidates.values():
        # steps of one that was made around another are that one's
        if known.isdisjoint(map(id, (one, *inner_optimizers(one).values()))):
            for p in params_of(one):
                owners.setdefault(id(p), []).append(type(one).__name__)
    lost: dict[str, list[str]] = {}
    for key, name, p in parameters:
        lost.setdefault(key, []).extend(f"{kind} of {name}" for kind in owners.get(id(p), ()))
    for key, names in lost.items():
        if names:
            raise UsageError(
                f"{key!r} is trained in backward by optimizers that are not in the state, and whose "
                f"states would be lost: {listed(names, MAX_NAMED)}",
                hint="hand them over in a list: {'optim': [optimizer_of[p] for p in model.parameters()]} "
                "(torch's own are in p._in_backward_optimizers); for the weights alone hand over "
                "model.state_dict()",
            )


def tell_gradient_hooks(state: State) -> None:
    """HoldfastWarning for parameters with hooks behind their gradients, which may step optimizers, that no
    optimizer of the state has."""
    if is_of_framework(state):
        return
    served = {id(p) for one in _optimizers_of(state) for p in params_of(one)}
    names = [
        f"{key}.{name}"
        for key, name, p in parameters_in(state)
        if getattr(p, "_post_accumulate_grad_hooks", None) and id(p) not in served
    ]
    if names:
        warn_user(
            f"{listed(names)}: hooks are called behind their gradients, and no optimizer of the state has "
            "these parameters; if the hooks step optimizers, the states of those are not saved: hand them "
            "over, too",
            notice="hooked-parameters",
        )


def _optimizers_of(state: State) -> Iterator[Any]:
    """Yield the optimizers of a state: its values, parts of them, and what its objects have."""
    for value in (*state.values(), *normalised(state).values()):
        optimizers = [one for _, one in optimizers_within(value)]
        if isinstance(value, Optimizer):
            optimizers += combined_parts(value).values()
        if hasattr(value, "__dict__"):
            optimizers += inner_optimizers(value).values()
        for outer in optimizers:
            yield from (outer, shown_optimizer(outer), stepping(outer))
