"""Optimizers of the live state: their parameters, the names of these, and the states of each.

Parameters that no other value of the state has, such as float32 masters of a bfloat16 model, are saved with
their optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.base.errors import UsageError
from holdfast.core.format.manifest import MODEL_STATES
from holdfast.live.sources import Group, Master, Source
from holdfast.live.state.encoding import encode_extra
from holdfast.live.state.modules import named_parameters
from holdfast.live.state.named import Collected, NamedTensors
from holdfast.live.state.optimizer_wrappers import stepping
from holdfast.live.state.placed import Placed, parts_in, place
from holdfast.live.state.recognising import (
    State,
    in_order,
    is_optimizer,
    is_plain,
    is_stateful,
    modules_in,
    sources_in,
)
from holdfast.live.state.several import CombinedOptimizer, holder


def param_names(state: State, groups: list[Group]) -> dict[int, str]:
    """Names of the parameters in an optimizer's groups, by id."""
    return {i: names[0] for i, names in all_param_names(state, groups).items()}


class ParamNames(dict[int, list[str]]):
    """Names of an optimizer's parameters, by id: every name of a tied one."""

    stated: Collection[int] = ()
    """Ids of parameters that only the optimizer's groups name."""
    beside: Collection[int] = ()
    """Ids of parameters that no module names, but a plain value or a group does."""


def all_param_names(state: State, groups: list[Group]) -> ParamNames:
    """Like `param_names`, but with every name of a tied parameter.

    A name begins with its module's key only where two modules that the optimizer serves share a parameter
    name; other modules of the state do not matter.  A tensor that is a plain value has its name in the
    checkpoint; a parameter that the state lacks has the name that the groups state.
    """
    found: dict[int, list[tuple[str, str]]] = {}
    keys: dict[str, set[str]] = {}
    for key, pairs in served_modules(state, groups).items():
        for name, p in pairs:
            found.setdefault(id(p), []).append((key, name))
            keys.setdefault(name, set()).add(key)
    names = ParamNames(
        (
            i,
            [
                name if len(keys[name]) == 1 else f"{key}.{name}"
                for key, name in dict.fromkeys(pairs)
            ],
        )
        for i, pairs in found.items()
    )
    if any(id(p) not in names for _, params in groups for p in params):
        from holdfast.live.state.nameless_parameters import add_others

        add_others(names, state, groups)
    return names


def served_modules(state: State, groups: list[Group]) -> dict[str, list[tuple[str, torch.Tensor]]]:
    """(name, parameter) pairs of each module of which groups have parameters, by key of the state."""
    served = {id(p) for _, params in groups for p in params}
    found: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for key, module in modules_in(in_order(state)):
        found.setdefault(key, []).extend(named_parameters(module))
    return {key: pairs for key, pairs in found.items() if any(id(p) in served for _, p in pairs)}


NamedGroups = list[list[tuple[str, torch.Tensor]]]
"""Names and parameters of each group."""


@dataclass(frozen=True)
class LiveOptimizer:
    """An optimizer of the state, with its groups and the names of its parameters."""

    key: str
    value: Any
    source: Source
    groups: list[Group]
    names: ParamNames
    pairs: NamedGroups
    """Name and parameter by group; a parameter without a name has one of its position."""

    @staticmethod
    def of(key: str, value: Any, source: Source, state: State) -> LiveOptimizer:
        groups = source.groups(value)
        names = all_param_names(state, groups)
        pairs = named_groups(groups, {i: found[0] for i, found in names.items()})
        return LiveOptimizer(key, value, source, groups, names, pairs)

    def serves(self, ids: Iterable[int]) -> bool:
        """True if one of these parameters, by id, is in the groups."""
        return not {id(p) for params in self.pairs for _, p in params}.isdisjoint(ids)


def own_params(state: State, optimizer: LiveOptimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, parameter) for parameters that no other value of the state has."""
    others = {id(t) for value in state.values() if is_plain(value) for _, t in tensors_in(value)}
    names = optimizer.names
    stated = {i: names[i][0] for i in names.stated}
    for pairs in named_groups(optimizer.groups, stated):
        for name, p in pairs:
            if (id(p) not in names or id(p) in stated) and id(p) not in others:
                yield f"{optimizer.key}.{name}.value", p


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of nested dicts and lists with their paths, as `format.extras` names them."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping) and not (path and is_stateful(value)):
        for k, v in value.items():
            yield from tensors_in(v, f"{path}.{k}" if path else str(k))
    elif isinstance(value, (list, tuple)) and not (path and is_stateful(value)):
        for i, v in enumerate(value):
            yield from tensors_in(v, f"{path}[{i}]")


def named_groups(groups: list[Group], names: dict[int, str]) -> NamedGroups:
    """(name, parameter) of each group; those without a name have one of their position."""
    return [
        [(names.get(id(p), f"group{g}.{i}"), p) for i, p in enumerate(params)]
        for g, (_, params) in enumerate(groups)
    ]


NO_HYPER = ("params", "param_names", "is_expert_parallel")
"""Keys of a group that are no hyper-parameters: its parameters, their names, Megatron's ranks."""


def hyper_parameters(group: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a group."""
    # DeepSpeed's groups of experts bear the name of the ranks that have them
    left_out = (*NO_HYPER, "moe", "name") if group.get("moe") is True else NO_HYPER
    return {k: v for k, v in group.items() if k not in left_out}


def encoded_hyper_parameters(key: str, group: dict[str, Any]) -> Any:
    """A parameter group's hyper-parameters as extras.  UsageError for sharded tensors among them."""
    live = Collected(inline_bytes=inf)
    encoded = encode_extra(live, key, hyper_parameters(group), inline=True)
    if live.tensors:
        raise UsageError(
            f"{min(live.tensors)}: a sharded tensor in a parameter group cannot be recorded",
            hint="have it whole (full_tensor()), or use memory= and durable saves alone",
        )
    return encoded


def add_optimizer(live: Collected, optimizer: LiveOptimizer) -> None:
    """Add an optimizer's states, its parameter groups, and its states that are no tensors."""
    key, all_names = optimizer.key, optimizer.names
    saved: list[Any] = []
    others: dict[str, Any] = {}
    orders: Orders = {}
    beside: dict[str, list[str]] = {}
    has_inside = False
    for (group, _), pairs in zip(optimizer.groups, optimizer.pairs):
        saved.append(
            {
                "params": [n for name, p in pairs for n in all_names.get(id(p), [name])],
                "hyper": encode_extra(live, key, hyper_parameters(group), inline=True),
            }
        )
        for name, p in pairs:
            plain = {}
            master = optimizer.source.master(p)
            if master is not None and master.stored and optimizer.source.by_master:
                raise UsageError(
                    f"{key}.{name}: a state that several weights share is not saved in another dtype"
                )
            for state, value in param_states(optimizer.value, p, master).items():
                _check_state(f"{key}.{name}", state)
                if isinstance(value, torch.Tensor):
                    stored = stored_form(state, value, master)
                    # one number of a master may serve many parameters
                    steady = master is None or (master.steady_states and value.ndim > 0)
                    steady &= stored is value
                    prefix = f"{key}.{name}"
                    add_state(live, prefix, str(state), p, stored, master, steady=steady)
                    add_ties(live, key, str(state), all_names.get(id(p), ()))
                    if master is None:
                        note_order(orders, (name, str(state)), value, p)
                else:
                    plain[str(state)] = encode_extra(
                        live, f"{key}.{name}.{state}", value, inline=True
                    )
                    if found := list(tensors_in(value, str(state))):
                        has_inside = True
                        if any(lies_as_its_parameter(p, t) for _, t in found):
                            beside.setdefault(name, []).append(str(state))
                    for path, t in found:
                        note_order(orders, (name, path), t, None)
            if plain:
                others |= dict.fromkeys(all_names.get(id(p), [name]), plain)
    body: dict[str, Any] = {"groups": saved, "state": others}
    body |= {"order": orders} if orders else {}
    # tensors in lists are what their parameters are, DTensors or not, but for those of these states
    body |= {"plain": beside} if has_inside else {}
    live.extras[key] = {"$optimizer": body}
    live.rules[key] = "merge"


def _check_state(name: str, state: Any) -> None:
    """UsageError for a state whose name a load could not find."""
    if isinstance(state, str) and state not in MODEL_STATES:
        return
    raise UsageError(
        f"{name}: the optimizer has a state under the key {state!r}, which is "
        + ("the name of tensors of models" if isinstance(state, str) else "no text"),
        hint="give it another name",
    )


def add_common(
    live: Collected, key: str, optimizer: Any, on_resize: dict[str, str] | None = None
) -> None:
    """Add an optimizer's state that belongs to no parameter, such as a counter in `state["k"]`.

    Torch's own optimizers have none; for others it is saved, too, that there is none.
    """
    if not isinstance(optimizer, Optimizer):
        return
    if isinstance(optimizer, CombinedOptimizer):
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
    live.extras[name] = encode_extra(live, name, tree, inline=True)


def _check_no_common(key: str, several: CombinedOptimizer) -> None:
    """UsageError if a part has state that belongs to no parameter: its name would not say which part's."""
    for label, part in several.parts.items():
        names = [k for k in stepping(part).state if not isinstance(k, torch.Tensor)]
        if names:
            raise UsageError(
                f"{key}{label}: a {type(part).__name__} with state that belongs to no parameter "
                f"({names[0]!r}), beside other optimizers",
                hint="hand the optimizers over one by one, each under a key of its own",
            )


def refuse_common(key: str, optimizer: Any, source: Source) -> None:
    """UsageError for state that belongs to no parameter of an optimizer inside a framework's."""
    masters = [source.master(p) for _, params in source.groups(optimizer) for p in params]
    inner = [m.optimizer for m in masters if m is not None and m.optimizer is not None]
    for one in dict.fromkeys(inner):
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


def holder_of(
    optimizer: Any, p: torch.Tensor, master: Master | None
) -> tuple[Optimizer | None, torch.Tensor]:
    """The torch optimizer that has the states of a parameter on this rank, if any, and the tensor that is
    its key."""
    if master is not None and not master.is_itself:
        return master.optimizer, master.tensor
    return (holder(optimizer, p) if isinstance(optimizer, Optimizer) else None), p


def param_states(optimizer: Any, p: torch.Tensor, master: Master | None) -> Mapping[str, Any]:
    """The optimizer states of a parameter that this rank saves, by name; empty if it saves none.

    A count of steps is a tensor in a checkpoint, also where an optimizer keeps a plain number.
    """
    inner, tensor = holder_of(optimizer, p, master)
    if inner is None or (master is not None and master.is_copy):
        return {}
    found: Mapping[str, Any] = inner.state.get(tensor, {})
    if master is not None and master.plain_numbers and isinstance(found.get("step"), int):
        return {**found, "step": torch.tensor(float(found["step"]))}
    return found


def stored_form(state: str, value: torch.Tensor, master: Master | None) -> torch.Tensor:
    """What is saved of a state: the live tensor, or a copy in the dtype that its master states."""
    dtype = None if master is None else master.stored.get(state)
    return value if dtype is None else value.to(dtype)


def check_exact(state: State, what: str) -> None:
    """UsageError if a save rounds states of optimizers: `what` goes on from the live ones."""
    sources = sources_in(state)
    for key, value in state.items():
        groups = sources.of(value).groups(value) if is_optimizer(value) else []
        masters = (sources.of(value).master(p) for _, params in groups for p in params)
        if names := sorted({name for m in masters if m is not None for name in m.stored}):
            raise UsageError(
                f"{what} needs states as they are, and {names[0]!r} of {key!r} is saved in another dtype",
                hint="use durable saves, and snapshots of the whole state",
            )


def add_state(
    live: NamedTensors,
    prefix: str,
    state: str,
    p: torch.Tensor,
    value: torch.Tensor,
    master: Master | None,
    *,
    steady: bool = True,
) -> None:
    """Add one tensor of a parameter's optimizer state."""
    name = f"{prefix}.{state}"
    if master is not None:
        live.add_parts(name, state, parts_in(master, value, name), value, steady=steady)
        if value.ndim and master.is_padded:
            live.padded.add(name)
    elif lies_as_its_parameter(p, value):
        live.add_parts(name, state, (place_state(p, value, name),), value, steady=steady)
    else:
        live.add(name, state, value, steady=steady)


def add_ties(live: NamedTensors, key: str, state: str, names: Sequence[str]) -> None:
    """State of a tied parameter goes by each of its names, as the parameter itself does."""
    for name in names[1:]:
        live.alias(f"{key}.{name}.{state}", f"{key}.{names[0]}.{state}")


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


# -- the order of dims in memory ----------------------------------------------------------------
# The values of a matrix and of its transposed copy are the same, but a product with it may be computed in
# another order, and differ in its last bit.  An optimizer that keeps a basis as `torch.linalg.eigh` or a
# transposition has made it goes on exactly only from memory in the same order.  A checkpoint is row-major,
# so the order of the dims is kept beside such states, and a restore makes their memory in that order.
# Memory that the optimizer has already stays as it is.


Orders = dict[str, dict[str, list[int]]]
"""Orders of dims, by the name of the parameter and the path of the state."""


def note_order(orders: Orders, at: tuple[str, str], state: Tensor, p: Tensor | None) -> None:
    """Note the dims of a state, from the outermost to the innermost in memory, unless a restore makes it so
    in any case: row-major, or like its parameter `p` if that is given and has its shape."""
    if state.is_contiguous() and (p is None or p.is_contiguous()):
        return
    is_plain = state.layout is torch.strided and not isinstance(state, DTensor)
    if state.ndim < 2 or not is_plain or isinstance(p, DTensor):
        return
    alike = p is not None and state.shape == p.shape
    usual = torch.empty_like(p, device="meta") if alike else torch.empty(state.shape, device="meta")
    if state.stride() != usual.stride():
        order = sorted(range(state.ndim), key=lambda d: (-state.stride(d), d))
        orders.setdefault(at[0], {})[at[1]] = order
