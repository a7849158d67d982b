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

They have moments as any other, and hang at the parameters: a script that hands over its model alone loses
them.  torch's own way (`_apply_optimizer_in_backward`) leaves them in an attribute of the parameter.  A
hook of the script reaches them by its closure, the globals that it names or the object that it is bound to.
A hook counts if it names `step`, and an optimizer if the parameter is one of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from holdfast.base.errors import UsageError, warn_user
from holdfast.live.state.live import State, stages
from holdfast.live.state.several import SHOWN, inner_optimizers, optimizers_in, parts_of
from holdfast.live.state.wrapped import bare, stepping

# -- communication hooks -----------------------------------------------------------------------------


STATELESS = (type(None), ProcessGroup, weakref.ref)
"""Types of what hooks that carry nothing over are registered with."""
UPCASTING = "torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks"
"""Module with torch's hook that DDP registers itself for `mixed_precision=`, which carries nothing over."""


def tell_hooks(state: State) -> None:
    """HoldfastWarning for each communication hook whose own state is neither a value of the state nor an
    attribute of one."""
    for key, value in state.items():
        for module in stages(value) or ():
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
            yield from part._comm_hooks


def _carries_over(kept: Any) -> bool:
    """True if what a hook was registered with may hold something from one step to the next."""
    return not isinstance(kept, STATELESS) and type(kept).__module__ != UPCASTING


def _has(state: State, kept: Any) -> bool:
    return any(
        value is kept or any(one is kept for one in getattr(value, "__dict__", {}).values())
        for value in state.values()
    )


# -- optimizers that step in backward ----------------------------------------------------------------


Lost = list[tuple[str, Any]]
"""Names of parameters, each with an optimizer."""


def check_in_backward(given: State, seen: State) -> None:
    """UsageError for optimizers that step in backward and that are not in the state, where a module with
    their parameters is.  `seen`: the state with containers of optimizers as one."""
    known = _known(given) | _known(seen)
    for key, value in seen.items():
        modules = [value] if isinstance(value, nn.Module) else value
        for module in modules if isinstance(modules, (list, tuple)) else ():
            if not isinstance(module, nn.Module):
                continue
            at_parameters = "[o for p in model.parameters() for o in p._in_backward_optimizers]"
            _refuse(key, _at_parameters(module, known), at_parameters)
            _refuse(key, _in_hooks(module, known), "[optimizer_of[p] for p in model.parameters()]")


def _refuse(key: str, lost: Lost, way: str) -> None:
    if lost:
        names = ", ".join(f"{type(one).__name__} of {name}" for name, one in lost[:SHOWN])
        more = f" and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""
        raise UsageError(
            f"{key!r} is trained in backward by optimizers that are not in the state, and whose "
            f"states would be lost: {names}{more}",
            hint=f"hand them over in a list: {{'optim': {way}}}; for the weights alone hand over "
            "model.state_dict()",
        )


def _known(state: State) -> set[int]:
    """Ids of the optimizers of a state: its values, parts of them, and what its objects have."""
    known: set[int] = set()
    for value in state.values():
        optimizers = [one for _, one in optimizers_in(value)]
        if isinstance(value, Optimizer):
            optimizers += parts_of(value).values()
        if hasattr(value, "__dict__"):
            optimizers += inner_optimizers(value).values()
        known |= {id(one) for outer in optimizers for one in (outer, bare(outer), stepping(outer))}
    return known


def _at_parameters(module: nn.Module, known: set[int]) -> Lost:
    """Optimizers that torch has hung at the parameters, and that are not known."""
    return [
        (name, one)
        for name, p in module.named_parameters()
        for one in getattr(p, "_in_backward_optimizers", ())
        if id(one) not in known
    ]


def _in_hooks(module: nn.Module, known: set[int]) -> Lost:
    """Optimizers that parameters' hooks step; none of a parameter of which they get at a known one,
    for the others may lie there unused."""
    hooked = [(name, p, _hooks(p)) for name, p in module.named_parameters() if _hooks(p)]
    reached = _Reached()
    for hook in (hook for _, _, hooks in hooked for hook in hooks):
        reached.follow(hook)
    owners: dict[int, list[Any]] = {}
    for one in reached.optimizers.values() if reached.steps else ():
        for p in (p for group in one.param_groups for p in group["params"]):
            owners.setdefault(id(p), []).append(one)
    served = {p for p, some in owners.items() if any(id(one) in known for one in some)}
    return [
        (name, one) for name, p, _ in hooked for one in owners.get(id(p), ()) if id(p) not in served
    ]


def _hooks(p: torch.Tensor) -> list[Any]:
    return list((getattr(p, "_post_accumulate_grad_hooks", None) or {}).values())


class _Reached:
    """Collects what hooks get at: by id, for hooks of many parameters mostly have the same."""

    def __init__(self) -> None:
        self.optimizers: dict[int, Any] = {}
        self.steps = False
        """True if a function among them names `step`."""
        self._met: dict[int, Any] = {}
        """Values that were met, by id; kept alive, for an id may be given to another one."""

    def follow(self, value: Any) -> None:
        """Follow a hook, or what one holds."""
        if id(value) in self._met:
            return
        self._met[id(value)] = value
        self.optimizers |= {id(one): one for _, one in optimizers_in(value)}
        if isinstance(value, partial):
            held = [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, MethodType):
            held = [value.__func__, value.__self__]
        elif isinstance(value, FunctionType):
            self.steps |= "step" in _names(value.__code__)
            held = [*_cells(value), *_globals(value)]
        elif isinstance(value, (type, ModuleType, Optimizer)) or not hasattr(value, "__dict__"):
            held = []
        else:
            self.optimizers |= {id(one): one for one in inner_optimizers(value).values()}
            call = vars(type(value)).get("__call__")
            held = [call] if isinstance(call, FunctionType) else []
        for one in held:
            self.follow(one)


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _globals(function: FunctionType) -> Iterator[Any]:
    """Globals that a function names; functions of other modules are none of the script's."""
    known = function.__globals__
    for name in _names(function.__code__):
        value = known.get(name)
        if not isinstance(value, FunctionType) or value.__globals__ is known:
            yield value


def _names(code: CodeType) -> set[str]:
    """Globals and attributes that a function names, or one that is inside it."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*map(_names, inner))
