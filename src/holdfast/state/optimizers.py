"""Optimizers of the live state: whose parameters they have, under which names, and what they keep of each.

Parameters that nothing else in the state has, such as float32 masters of a bfloat16 model, are saved with
their optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.errors import UsageError
from holdfast.state.live import (
    Engine,
    Live,
    State,
    encode,
    in_order,
    is_copy,
    is_optimizer,
    is_stateful,
    named_parameters,
    stages,
)
from holdfast.state.megatron import Megatron
from holdfast.state.memory_order import order_of
from holdfast.state.placed import Placed, place
from holdfast.state.several import Several, holder
from holdfast.state.wrapped import stepping
from holdfast.state.zero import Group


def groups_of(optimizer: Any, zero: Engine | None) -> list[Group]:
    """Each parameter group's dict, and the parameters of the model that are in it."""
    if zero is not None:
        return zero.groups
    return [(group, group["params"]) for group in optimizer.param_groups]


def param_names(state: State, optimizer: Any, zero: Engine | None) -> dict[int, str]:
    """Fully qualified names of the parameters of an optimizer, by object."""
    return {i: names[0] for i, names in all_param_names(state, optimizer, zero).items()}


def all_param_names(state: State, optimizer: Any, zero: Engine | None) -> dict[int, list[str]]:
    """Like `param_names`, but with every name of a tied parameter.

    A name carries its module's key only where two modules that the optimizer serves share a
    parameter name; what other modules the state has makes no difference.
    """
    found: dict[int, list[tuple[str, str]]] = {}
    keys: dict[str, set[str]] = {}
    for key, pairs in served_modules(state, optimizer, zero).items():
        for name, p in pairs:
            found.setdefault(id(p), []).append((key, name))
            keys.setdefault(name, set()).add(key)
    return {
        i: [name if len(keys[name]) == 1 else f"{key}.{name}" for key, name in dict.fromkeys(pairs)]
        for i, pairs in found.items()
    }


def served_modules(
    state: State, optimizer: Any, zero: Engine | None
) -> dict[str, list[tuple[str, torch.Tensor]]]:
    """(name, parameter) pairs of each module that the optimizer serves, by key of the state."""
    served = {id(p) for _, params in groups_of(optimizer, zero) for p in params}
    found: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for key, value in in_order(state).items():
        pairs = [pair for module in stages(value) or () for pair in named_parameters(module)]
        if any(id(p) in served for _, p in pairs):
            found[key] = pairs
    return found


def own_params(
    state: State, key: str, optimizer: Any, names: Collection[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """An optimizer's parameters that nothing else in the state has.  `names`: by id, the others'."""
    others = {id(t) for value in state.values() if is_plain(value) for _, t in tensors_in(value)}
    for pairs in named_groups(groups_of(optimizer, None), {}):
        for name, p in pairs:
            if id(p) not in names and id(p) not in others:
                yield f"{key}.{name}.value", p


def is_plain(value: Any) -> bool:
    """True if a value is plain (tensors, lists, dicts): no module, optimizer or stateful object."""
    return stages(value) is None and not is_stateful(value) and not is_optimizer(value)


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of nested dicts and lists with their paths, as `format.extras` names them."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for k, v in value.items():
            yield from tensors_in(v, f"{path}.{k}" if path else str(k))
    elif isinstance(value, (list, tuple)):
        for i, v in enumerate(value):
            yield from tensors_in(v, f"{path}[{i}]")


def named_groups(
    groups: list[Group], names: dict[int, str]
) -> list[list[tuple[str, torch.Tensor]]]:
    """(name, parameter) of each group; names from the state's modules, else by position."""
    return [
        [(names.get(id(p), f"group{g}.{i}"), p) for i, p in enumerate(params)]
        for g, (_, params) in enumerate(groups)
    ]


NO_HYPER = ("params", "param_names", "is_expert_parallel")
"""Keys of a group that do not say how it is trained: whom it has, how Megatron's ranks lie."""


def hyper(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in NO_HYPER}


def add_optimizer(
    live: Live, key: str, optimizer: Any, zero: Engine | None, all_names: dict[int, list[str]]
) -> None:
    saved: list[Any] = []
    others: dict[str, Any] = {}
    orders: dict[str, dict[str, list[int]]] = {}
    names = {i: found[0] for i, found in all_names.items()}
    groups = groups_of(optimizer, zero)
    for (group, _), pairs in zip(groups, named_groups(groups, names)):
        saved.append(
            {
                "params": [n for name, p in pairs for n in all_names.get(id(p), [name])],
                "hyper": encode(live, key, hyper(group), inline=True),
            }
        )
        # DeepSpeed's Muon writes its momentum before the optimizer's step begins
        steady = zero is None or not group.get("use_muon")
        for name, p in pairs:
            plain = {}
            states = states_of(optimizer, p, zero)
            for state, value in states.items():
                _check_state(f"{key}.{name}", state)
                if isinstance(value, torch.Tensor):
                    whole = zero is None or value.ndim > 0  # one number serves many parameters
                    prefix, still = f"{key}.{name}", steady and whole
                    add_state(live, prefix, str(state), p, value, zero, steady=still)
                    add_ties(live, key, str(state), all_names.get(id(p), ()))
                    order = order_of(value, p) if zero is None else None
                    if order is not None:
                        orders.setdefault(name, {})[str(state)] = order
                else:
                    plain[str(state)] = encode(live, f"{key}.{name}.{state}", value, inline=True)
            if plain:
                others |= dict.fromkeys(all_names.get(id(p), [name]), plain)
    body: dict[str, Any] = {"groups": saved, "state": others}
    live.extras[key] = {"$optimizer": {**body, "order": orders} if orders else body}
    live.rules[key] = "merge"


KINDS = ("param", "buffer", "tensor")
"""Values of a saved tensor's `state` that say that it is no state of an optimizer."""


def _check_state(name: str, state: Any) -> None:
    """UsageError for a state that would not be found again."""
    if isinstance(state, str) and state not in KINDS:
        return
    raise UsageError(
        f"{name}: the optimizer has a state under the key {state!r}, which is "
        + ("the name of tensors of models" if isinstance(state, str) else "no text"),
        hint="give it another name",
    )


def add_common(
    live: Live, key: str, optimizer: Any, on_resize: dict[str, str] | None = None
) -> None:
    """Add an optimizer's state that belongs to no parameter, such as a counter in `state["k"]`.

    Torch's own optimizers have none; for others it is saved, too, that there is none.
    """
    if not isinstance(optimizer, Optimizer):
        return
    if isinstance(optimizer, Several):
        _check_no_common(key, optimizer)
        return
    inner = stepping(optimizer)
    found = {k: v for k, v in inner.state.items() if not isinstance(k, torch.Tensor)}
    if not found and type(inner).__module__.startswith("torch.optim."):
        return
    name = common_name(key)
    cut = [path for path, t in tensors_in(found) if isinstance(t, DTensor)]
    if cut:
        raise UsageError(
            f"{key}.state.{cut[0]}: a DTensor that belongs to no parameter cannot be saved",
            hint="let the optimizer keep it as a plain tensor, or as the state of a parameter",
        )
    on_device = [
        k for k, v in found.items() if any(t.device.type != "cpu" for _, t in tensors_in(v))
    ]
    if on_resize and name in on_resize:
        live.rules[name] = on_resize[name]
    tree = {"state": found, "on_device": on_device}
    live.extras[name] = encode(live, name, tree, inline=True)


def _check_no_common(key: str, several: Several) -> None:
    """UsageError if a part has state that belongs to no parameter: its name would not say which part's."""
    for label, part in several.parts.items():
        names = [k for k in stepping(part).state if not isinstance(k, torch.Tensor)]
        if names:
            raise UsageError(
                f"{key}{label}: a {type(part).__name__} with state that belongs to no parameter "
                f"({names[0]!r}), beside other optimizers",
                hint="hand the optimizers over one by one, each under a key of its own",
            )


def refuse_common(key: str, engine: Engine) -> None:
    """UsageError for state that belongs to no parameter of an optimizer inside a framework's."""
    if isinstance(engine, Megatron):
        inner = {id(held.inner): held.inner for held in engine.held.values()}
    else:
        inner = {id(engine.inner): engine.inner} if engine.inner is not None else {}
    for one in inner.values():
        names = [k for k in one.state if not isinstance(k, torch.Tensor)]
        if names:
            raise UsageError(
                f"{key}: the {type(one).__name__} inside has state that belongs to no parameter "
                f"({names[0]!r}), which is not saved of a framework's optimizer",
                hint="keep it in the parameter groups, or in an object with state_dict() and "
                "load_state_dict() that is a value of the state",
            )


def common_name(key: str) -> str:
    """Name of the extra that holds the state of optimizer `key` that belongs to no parameter."""
    return f"{key}.common"


def states_of(optimizer: Any, p: torch.Tensor, zero: Engine | None) -> Mapping[str, Any]:
    """The optimizer states of a parameter that this rank saves, by name; empty if it saves none."""
    if zero is None:
        inner = holder(optimizer, p)
        return inner.state.get(p, {}) if inner is not None else {}
    return {} if is_copy(zero, p) else zero.states(p)


def add_state(
    live: Live,
    prefix: str,
    state: str,
    p: torch.Tensor,
    value: torch.Tensor,
    zero: Engine | None,
    *,
    steady: bool = True,
) -> None:
    """Add one tensor of a parameter's optimizer state."""
    name = f"{prefix}.{state}"
    if zero is None and not lies_as_its_parameter(p, value):
        live.add(name, state, value, steady=steady)
        return
    parts = (place_state(p, value, name),) if zero is None else zero.state_parts(p, value, name)
    live.add_parts(name, state, parts, value, steady=steady)
    if isinstance(zero, Megatron) and value.ndim and zero.is_padded(p):
        live.padded.add(name)


def add_ties(live: Live, key: str, state: str, names: Sequence[str]) -> None:
    """State of a tied parameter goes by each of its names, as the parameter itself does."""
    for name in names[1:]:
        live.aliases[f"{key}.{name}.{state}"] = f"{key}.{names[0]}.{state}"


def place_state(p: torch.Tensor, value: torch.Tensor, name: str) -> Placed:
    """Like `place`, for a tensor that `lies_as_its_parameter`: beside a sharded parameter, one of the shape
    of its local part is that part."""
    like = place(p, name)
    if like.box.shape == like.shape:
        return place(value, name)
    if tuple(value.shape) != like.box.shape:
        raise UsageError(
            f"{name!r}: a plain tensor of shape {tuple(value.shape)} beside a sharded "
            f"parameter of shape {like.shape} (here {like.box.shape}): "
            "which part of what it is cannot be known",
            hint="let the optimizer keep this state as a DTensor",
        )
    return Placed(value.detach(), like.shape, like.box, like.cuts)


def lies_as_its_parameter(p: torch.Tensor, value: torch.Tensor) -> bool:
    """True if only the parameter, a DTensor, tells where an optimizer's plain tensor lies."""
    return isinstance(p, DTensor) and not isinstance(value, DTensor) and value.ndim > 0
