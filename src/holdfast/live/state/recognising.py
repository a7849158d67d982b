"""Questions about a value of the state: module, optimizer, object with a state_dict(), or plain value?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.base.errors import UsageError
from holdfast.core.format import extras
from holdfast.live.sources import Source, Sources, frameworks, is_owned
from holdfast.live.state.several import State as State
from holdfast.live.state.several import expand_optimizers


def is_stateful(value: Any) -> bool:
    """True for an object with a state_dict() that can be loaded."""
    names = ("state_dict", "load_state_dict")
    return not isinstance(value, type) and all(callable(getattr(value, n, None)) for n in names)


def is_object(value: Any) -> bool:
    """True if a value, where a list or a dict has it, is saved by its own state_dict()."""
    return is_stateful(value) and not isinstance(value, (nn.Module, Optimizer))


def is_loader(value: Any) -> bool:
    """True if an object yields data: then its position means nothing on other ranks."""
    return hasattr(value, "__iter__") and hasattr(value, "state_dict")


def stages(value: Any) -> list[nn.Module] | None:
    """The modules of a module or of a list of pipeline stages; None for anything else."""
    if isinstance(value, nn.Module):
        return [value]
    if isinstance(value, (list, tuple, nn.ModuleList)) and value:
        if all(isinstance(v, nn.Module) for v in value):
            return list(value)
    return None


def modules_in(state: State) -> Iterator[tuple[str, nn.Module]]:
    """Yield (key, module) for each module of a state; a list of pipeline stages has several."""
    for key, value in state.items():
        yield from ((key, module) for module in stages(value) or ())


def parameters_in(state: State) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yield key, name and parameter for all modules of a state."""
    for key, module in modules_in(state):
        yield from ((key, name, p) for name, p in module.named_parameters())


def saves_itself(value: Any) -> bool:
    """True for an object that is saved by its state_dict(): no module or optimizer."""
    return is_stateful(value) and stages(value) is None and not is_optimizer(value)


def is_plain(value: Any) -> bool:
    """True if a value is plain (tensors, lists, dicts): no module, optimizer or stateful object."""
    return stages(value) is None and not is_stateful(value) and not is_optimizer(value)


def is_optimizer(value: Any) -> bool:
    """True for a torch optimizer, or a framework's in its place."""
    return isinstance(value, Optimizer) or (not isinstance(value, nn.Module) and is_owned(value))


def sources_in(state: State) -> Sources:
    """The source of each module and optimizer of a state."""
    known = frameworks()
    if not known:
        return Sources()
    modules = {key: stages(value) or [] for key, value in state.items()}
    apart = expand_optimizers(state)
    found: dict[int, Source] = {}
    for framework in known:
        found |= framework.sources(modules, apart)
    for key, value in apart.items():
        if id(value) not in found and is_optimizer(value) and not isinstance(value, Optimizer):
            raise UsageError(
                f"{key!r}: its framework tells nothing of this {type(value).__name__}, so what it keeps of "
                "which weights is not known",
                hint="hand its model over, too; Framework.sources() must tell of each optimizer it owns",
            )
    return Sources(found)


def is_of_framework(state: State) -> bool:
    """True if any module or optimizer of a state is a framework's."""
    return bool(frameworks()) and any(
        is_owned(one) for value in state.values() for one in stages(value) or [value]
    )


def in_order(state: State) -> State:
    """The state with sorted keys.  An object's `state_dict()` may have collectives, so ranks must call them
    in one order, however each rank built its dict."""
    return dict(sorted(state.items()))


def check_keys(
    state: State, empty: str = "state is an empty dict: it names nothing to save or load"
) -> None:
    """UsageError for a state that names nothing, with that message, or has keys that cannot be written."""
    if not isinstance(state, dict):
        raise UsageError(
            "state must be a dict such as {'model': model, 'optim': optimizer}, "
            f"not {type(state).__name__}"
        )
    if not state:
        raise UsageError(
            empty,
            hint="hand over a dict such as {'model': model, 'optim': optimizer}",
        )
    for key in state:
        if not isinstance(key, str) or not key or "." in key or "/" in key or key[0] == "$":
            is_state_dict = isinstance(key, str) and all(torch.is_tensor(v) for v in state.values())
            raise UsageError(
                f"key {key!r} of the state must be a name without '.', '/' or '$'",
                hint="this looks like a state_dict(): hand over the module itself, {'model': model}"
                if is_state_dict
                else None,
            )
        # as of an enum: names begin with it
        if type(key) is not str and f"{key}" != str.__str__(key):
            raise UsageError(
                f"key {key!r} of the state must be a plain text: it is written as '{key}'",
                hint=f"give {str.__str__(key)!r} itself",
            )
        extras.encode(key, path=key, utf8=True)
