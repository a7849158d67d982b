"""Tensors in attributes of objects that neither the state nor a `state_dict()` has.

    self.masters = [p.detach().float() for p in params]          float32 masters of bfloat16 weights
    self.averages = {p: p.clone() for p in params}

The training depends on them, and a restart has those of a fresh build.  Not counted are:

* tensors in the memory of a parameter, a gradient, a state or any saved tensor: views, flat buffers,
  tensors that the script hands over, too;
* constants, such as a table of levels for quantised states.  An optimizer's tensor counts if it has the
  shape of a parameter or as many elements as a group together, or if it was written.  Single numbers are
  left to `state.numbers`.

Of modules and averages only whole copies of a model's parameters count: activations, masks and caches do
not matter after a restart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.base.errors import warn_user
from holdfast.base.text import listed
from holdfast.live.state.modules import module_tensors
from holdfast.live.state.optimizer_wrappers import params_of, stepping
from holdfast.live.state.placed import memory_of
from holdfast.live.state.recognising import (
    State,
    is_optimizer,
    is_stateful,
    modules_in,
    saves_itself,
    stages,
)
from holdfast.live.state.several import combined_parts, inner_optimizers
from holdfast.live.state.tensor_kinds import is_plain_type
from holdfast.live.state.writes import times_written

SAVED_ATTRIBUTES = ("state", "param_groups", "defaults")
"""Attributes of an optimizer that are saved, and the default settings of groups."""
CONTAINERS = (list, tuple, dict, deque, set, frozenset)
MAX_ITEMS = 10_000
"""Most values of a container that are searched."""
DEPTH = 6
"""Deepest nesting of containers that is searched for tensors."""


def tensors_held(
    value: Any, path: str = "", depth: int = DEPTH
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) of a tensor, of containers at any depth, and of one object around them."""
    yield from _held(value, path, depth, objects=1)


def _held(value: Any, path: str, depth: int, objects: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth == 0 or isinstance(value, (str, bytes, int, float, type(None))):
        return
    elif isinstance(value, dict):
        for number, (key, one) in enumerate(islice(list(value.items()), MAX_ITEMS)):
            shown = repr(key) if isinstance(key, (str, int)) else str(number)
            yield from _held(one, f"{path}[{shown}]", depth - 1, objects)
    elif isinstance(value, CONTAINERS):
        for number, one in enumerate(islice(list(value), MAX_ITEMS)):
            yield from _held(one, f"{path}[{number}]", depth - 1, objects)
    elif objects and _is_small_object(value):
        for name, one in _attributes(value).items():
            yield from _held(one, f"{path}.{name}", depth - 1, objects - 1)


def _is_small_object(value: Any) -> bool:
    """True for an object that may be a plain record of values."""
    kind = type(value)
    return not (
        callable(value)
        or isinstance(value, (nn.Module, Optimizer))
        or kind.__module__.partition(".")[0] in ("builtins", "torch", "weakref")
    )


def _attributes(value: Any) -> dict[str, Any]:
    """An object's attributes, also those in slots."""
    found: dict[str, Any] = {}
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else tuple(slots):
            descriptor: Any = vars(kind).get(slot)
            if hasattr(descriptor, "__get__"):
                with suppress(AttributeError):  # it has no value yet
                    found[slot] = descriptor.__get__(value, kind)
    kept = getattr(value, "__dict__", None)
    return {**found, **kept} if isinstance(kept, dict) else found


# -- what is saved ----------------------------------------------------------------------------------


def address_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage, which other tensors may share; its id if it has none."""
    try:
        memory = memory_of(tensor)
        address = memory.untyped_storage().data_ptr() if is_plain_type(type(memory)) else 0  # type: ignore[arg-type]
    except (RuntimeError, NotImplementedError):  # of torch, for kinds without a storage
        address = 0
    return address or id(tensor)


def state_addresses(state: State) -> set[int]:
    """The addresses of all tensors of a state, and of gradients."""
    found: set[int] = set()
    for _, module in modules_in(state):
        found |= _with_gradients(module_tensors(module))
    for value in state.values():
        if isinstance(value, Optimizer):
            for part in combined_parts(value).values():
                found |= optimizer_addresses(part)
        elif stages(value) is None and not is_optimizer(value):
            saved = value.state_dict() if is_stateful(value) else value
            found |= {address_of(t) for _, t in tensors_held(saved)}
    return found


def optimizer_addresses(optimizer: Optimizer) -> set[int]:
    """The addresses of an optimizer's saved tensors, and of its gradients."""
    inner = stepping(optimizer)
    states = dict(inner.state or {})
    return _with_gradients(params_of(inner)) | {
        address_of(t) for one in (states, inner.param_groups) for _, t in tensors_held(one)
    }


def _with_gradients(tensors: list[torch.Tensor]) -> set[int]:
    """The addresses of tensors and of their gradients."""
    return set(map(address_of, (*tensors, *(t.grad for t in tensors if t.grad is not None))))


# -- what is not ------------------------------------------------------------------------------------


def outside(optimizer: Optimizer, state: State) -> dict[str, list[str]]:
    """Attributes of an optimizer with tensors that the training depends on and nothing saves: the tensors'
    paths, by the attribute's name."""
    found = [
        (name, path, tensor)
        for name, value in vars(optimizer).items()
        if name not in SAVED_ATTRIBUTES
        for path, tensor in tensors_held(value, name)
    ]
    found = [one for one in found if _may_be_trained(one[2])]
    if found:
        known = optimizer_addresses(optimizer)
        found = [one for one in found if address_of(one[2]) not in known]
    if found:
        params = params_of(optimizer)
        shapes = {tuple(p.shape) for p in params} | {tuple(memory_of(p).shape) for p in params}
        least = min(_sizes(optimizer), default=0)
        found = [one for one in found if _is_trained(one[2], shapes, least)]
    if found:
        known = state_addresses(state)
        found = [one for one in found if address_of(one[2]) not in known]
    by_name: dict[str, list[str]] = {}
    for name, path, _ in found:
        by_name.setdefault(name, []).append(path)
    return by_name


def _sizes(optimizer: Optimizer) -> list[int]:
    """Number of elements of each group here."""
    return [sum(memory_of(p).numel() for p in g["params"]) for g in optimizer.param_groups]


def _may_be_trained(tensor: torch.Tensor) -> bool:
    return (
        tensor.numel() > 1
        and not tensor.is_meta
        and (tensor.is_floating_point() or tensor.is_complex())  # others are indices and masks
    )


def _is_trained(tensor: torch.Tensor, shapes: set[tuple[int, ...]], least: int) -> bool:
    is_like = tuple(tensor.shape) in shapes or (least > 1 and tensor.numel() >= least)
    return is_like or times_written(tensor) > 0


def tell_outside(state: State) -> None:
    """HoldfastWarning for each module or object whose attributes have a copy of all parameters of a model,
    and for objects around an optimizer with tensors like its parameters, that their states do not have."""
    for key, value in state.items():
        found = [name for module in stages(value) or () for name in copies(key, module, state)]
        if saves_itself(value):
            found = copies(key, value, state) or _beside_optimizers(key, value, state)
        if found:
            warn_user(
                f"{listed(found)}: tensors in attributes that no state_dict() has are not saved, and a "
                "restart goes on with those of a fresh build: make them buffers, or let "
                "state_dict() have them",
                notice="tensors-outside",
            )


def _beside_optimizers(key: str, value: Any, state: State) -> list[str]:
    """Unsaved tensors of an object around optimizers that have the shape of their parameters."""
    inner = inner_optimizers(value) if hasattr(value, "__dict__") else {}
    shapes = {tuple(p.shape) for one in inner.values() for p in params_of(one)}
    found = [
        (f"{key}.{path}", tensor)
        for name, one in (vars(value).items() if shapes else ())
        for path, tensor in _held(one, name, DEPTH, 0)
        if tensor.numel() > 1 and tuple(tensor.shape) in shapes
    ]
    known = state_addresses(state) if found else set()
    for one in inner.values() if found else ():
        known |= optimizer_addresses(one)
    return [name for name, tensor in found if address_of(tensor) not in known]


def copies(key: str, root: Any, state: State) -> list[str]:
    """Unsaved attributes of a module's submodules, or of an object, that hold a copy of all parameters of a
    model; by their names in the state."""
    parts: Iterable[tuple[str, Any]] = [("", root)]
    if isinstance(root, nn.Module):
        parts = ((n, m) for n, m in root.named_modules() if not _says_more(m))
    found = [
        (f"{key}.{path}.{name}" if path else f"{key}.{name}", tensors)
        for path, part in parts
        for name, value in list(_own_attributes(part))
        if isinstance(value, CONTAINERS) and len(value) > 1
        for tensors in [[t for _, t in tensors_held(value)]]
        if len(tensors) > 1 and any(t.numel() > 1 for t in tensors)
    ]
    if not found:
        return []
    models = [m for _, module in modules_in(state) for m in _models(module)]
    known = state_addresses(state)
    return [
        name
        for name, tensors in found
        if not any(address_of(t) in known for t in tensors)
        and _shapes(tensors) in map(_shapes, models)
    ]


def _own_attributes(part: Any) -> Iterator[tuple[str, Any]]:
    if type(part).__module__.partition(".")[0] != "torch":
        for name, value in getattr(part, "__dict__", {}).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield name, value


def _models(module: nn.Module) -> Iterator[list[torch.Tensor]]:
    """The parameters of a module and of each child, all of them and those that are trained."""
    for one in (module, *module.children()):
        params = list(one.parameters())
        trained = [p for p in params if p.requires_grad]
        yield from (some for some in (params, trained) if len(some) > 1)


def _shapes(tensors: list[torch.Tensor]) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in tensors]


def _says_more(module: nn.Module) -> bool:
    """True if a module's state_dict() may have more than parameters and buffers."""
    kind = type(module)
    names = ("get_extra_state", "state_dict", "_save_to_state_dict")
    if any(getattr(kind, name) is not getattr(nn.Module, name) for name in names):
        return True
    return bool(module._state_dict_hooks or module._state_dict_pre_hooks)


def saved_names(tree: Any, depth: int = DEPTH) -> Iterator[tuple[str, Any]]:
    """Yield (name, number) for each plain number of a nested state."""
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, Mapping):
        pairs = islice(list(tree.items()), MAX_ITEMS)
    elif isinstance(tree, (list, tuple, deque)):
        pairs = [("", one) for one in islice(tree, MAX_ITEMS)]
    for name, value in pairs if depth else ():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield str(name), value
        elif isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
            yield str(name), value.item()
        else:
            yield from saved_names(value, depth - 1)
