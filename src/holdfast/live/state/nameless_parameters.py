"""Names of parameters that no module of the state has.

    torch.optim.Adam(model.named_parameters())        by the names that torch keeps in the groups
    torch.optim.Adam(agent.net.parameters())          by where the state_dict() of an agent in the state
                                                      has them: `agent.net.0.weight`
    torch.optim.Adam(model.parameters())              by position, `group0.3`: no name is to be had

A position identifies a parameter as long as the script makes the optimizer in the same order.  Where all
shapes differ, another order does not fit and is refused.  Where two shapes are equal, the order is
unproved: the first save warns, and a load refuses an order that it cannot prove
(`live.restore.matching_by_order`), unless the parameters are masters, which are known by their values.

Names of wrappers at the front or inside are left out, as for modules: a script may be compiled, or wrapped
in DDP, at one start and not at the next.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from holdfast.base.errors import warn_user
from holdfast.core.format.extras import MAX_EXTRAS_DEPTH
from holdfast.live.sources import Group
from holdfast.live.state.modules import named_parameters
from holdfast.live.state.named import Collected
from holdfast.live.state.optimizers import LiveOptimizer, NamedGroups, ParamNames, tensors_in
from holdfast.live.state.own_state_dicts import memory_place
from holdfast.live.state.placed import local_of
from holdfast.live.state.recognising import (
    State,
    in_order,
    is_loader,
    is_optimizer,
    is_plain,
    is_stateful,
    modules_in,
    stages,
)
from holdfast.live.state.rng import Rng
from holdfast.live.state.tensor_kinds import PLAIN_TENSORS

IS_POSITION = re.compile(r"group\d+\.\d+")
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_DDP = "module."

WAYS_OUT = (
    "make the optimizer from named parameters: AdamW([('log_alpha', log_alpha), ...]), hand the tensors "
    "over as values of the state ({'log_alpha': log_alpha, ...}), or restore(strict=False), which takes "
    "them in their order"
)
"""Hints for parameters without names."""

in_saved_order: WeakSet[Any] = WeakSet()
"""Optimizers that holdfast has made, with parameters in the order of a checkpoint."""


def is_in_saved_order(optimizer: Any) -> bool:
    """True if holdfast has made the optimizer with parameters in the order of a checkpoint."""
    return any(one is optimizer for one in in_saved_order)


def add_others(names: ParamNames, state: State, groups: list[Group]) -> None:
    """Name parameters that no module has: by their place in the state, else by names in the groups."""
    taken, of_modules = {name for several in names.values() for name in several}, {*names}
    for key, value in in_order(state).items():
        for path, p in tensors_in(value) if is_plain(value) else ():
            name = f"{key}.{path}" if path else key
            if name not in taken:
                names.setdefault(id(p), [name])
    taken = {name for several in names.values() for name in several}
    found = {i: n for i, n in _stated(groups).items() if i not in names and n not in taken}
    if rest := [p for _, params in groups for p in params if id(p) not in names | found]:
        taken |= {*found.values()}
        of_objects = names_in_objects(state, rest).items()
        found |= {i: n for i, n in of_objects if n not in taken and not IS_POSITION.fullmatch(n)}
    names.stated = found.keys()
    names.update({i: [name] for i, name in found.items()})
    names.beside = names.keys() - of_modules


def _stated(groups: list[Group]) -> dict[int, str]:
    """Names that groups state, by id of the parameter, without names of two parameters and names that look
    like positions."""
    found: dict[int, str] = {}
    for group, params in groups:
        names = group.get("param_names")
        if isinstance(names, (list, tuple)) and len(names) == len(params):
            pairs = [(id(p), n) for n, p in zip(names, params) if isinstance(n, str) and n]
            found |= {i: _WRAPPERS.sub("", name) for i, name in pairs}
    while found and all(name.startswith(_DDP) and name != _DDP for name in found.values()):
        found = {i: name.removeprefix(_DDP) for i, name in found.items()}
    times = Counter(found.values())
    return {i: n for i, n in found.items() if times[n] == 1 and not IS_POSITION.fullmatch(n)}


def by_position(named: NamedGroups) -> dict[str, torch.Tensor]:
    """The parameters that are named by their position."""
    return {
        name: p
        for g, pairs in enumerate(named)
        for i, (name, p) in enumerate(pairs)
        if name == f"group{g}.{i}"
    }


def same_shapes(params: Mapping[str, torch.Tensor]) -> dict[tuple[int, ...], list[str]]:
    """Names of parameters by shape, for shapes of several parameters."""
    found: dict[tuple[int, ...], list[str]] = {}
    for name, p in params.items():
        found.setdefault(tuple(p.shape), []).append(name)
    return {shape: names for shape, names in found.items() if len(names) > 1}


def shown_alike(found: Mapping[tuple[int, ...], list[str]]) -> str:
    """Text for parameters of one shape: `group0.0 and group0.1 have shape (4, 4)`."""
    shape, names = max(found.items(), key=lambda pair: len(pair[1]))
    more = sum(map(len, found.values())) - 2
    return f"{names[0]} and {names[1]} have shape {shape}" + f" ({more} more are alike)" * (
        more > 0
    )


def note_positions(live: Collected, optimizer: LiveOptimizer, state: State) -> None:
    """Note the weights of which parameters are masters.  Without masters, the first save gives a
    HoldfastWarning for parameters that a restart could not tell apart.

    An empty note is written, too: steps of releases that did not prove orders have none."""
    key, params = optimizer.key, by_position(optimizer.pairs)
    found = same_shapes(params)
    masters = noted_masters(optimizer.value, state, params) if found else {}
    live.extras[key]["$optimizer"]["masters"] = masters
    if found and not masters and not live.before and not is_in_saved_order(optimizer.value):
        warn_user(
            f"{key!r}: parameters of this optimizer go by their positions, for nothing names them, and "
            f"{shown_alike(found)}: a restart will be refused, for in another order they would be swapped, "
            f"and nothing proves the order.  What to do: {WAYS_OUT}",
            notice="positions",
        )


# -- names in objects ---------------------------------------------------------------------------
# A `state_dict()` of an object has parameters themselves, or others that lie in their memory with their
# shape, as what nn.Module's gives.  It may be slow, or talk to other ranks: it is asked once, for
# parameters that nothing else names.  Loaders are not asked, for that may draw from them; nor is one that
# cannot be asked yet.


LEAVES = (int, float, complex, str, bytes, type(None))

_of_objects: Any = WeakTensorKeyDictionary()
"""By parameter: the keys of the state that was searched, and the name, which is empty if none was found."""


def names_in_objects(state: State, params: Sequence[torch.Tensor]) -> dict[int, str]:
    """Names of parameters, by id, that objects of the state have."""
    keys = {*state}
    if any(_of_objects.get(p, (None, ""))[0] != keys for p in params):
        found: dict[Any, str] = {}
        for key, value in in_order(state).items():
            if not isinstance(value, (torch.Tensor, Rng)) and stages(value) is None:
                for name, t in _asked(value, key):
                    found.setdefault(memory_place(t), name)
        found.pop(None, None)
        for p in params:
            _of_objects[p] = keys, found.get(memory_place(p), "")
    return {id(p): name for p in params if (name := _of_objects[p][1])}


def _asked(value: Any, key: str) -> list[tuple[str, torch.Tensor]]:
    """(path, tensor) of the objects in a value of the state, sorted: a tensor with two paths always gets
    the same one."""
    with suppress(Exception):  # of the script's own, which may not be ready before it is loaded
        return sorted(_tensors(value, key), key=lambda pair: pair[0])
    return []


def _tensors(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) of what objects in a value have."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (*LEAVES, nn.Module)) or is_optimizer(value) or depth > MAX_EXTRAS_DEPTH:
        return
    elif is_stateful(value):
        if not is_loader(value):
            yield from _tensors(value.state_dict(), path, depth + 1)
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from _tensors(one, f"{path}.{name}", depth)
    elif isinstance(value, (list, tuple)):
        for i, one in enumerate(value):
            yield from _tensors(one, f"{path}[{i}]", depth)


# -- masters that a script keeps itself: float32 copies of weights, recognised by their values --------
#
#    masters = [p.detach().float() for p in model.parameters()]
#    {"model": model, "optim": torch.optim.AdamW(masters)}
#
# Masters have no names, but each, rounded, equals a weight of the model: right after they are made, and
# after each step that writes them back.  So the first save notes the weight of each master.  A load
# compares values again before anything is read: if each is the master of the same weight, their order is
# proved.  Weights with equal values (biases of zeros) prove nothing.


SAMPLE = 256
"""Number of elements of a weight that are compared."""
ALIKE = ""
"""In the place of a name: several weights have these values."""

_noted: WeakKeyDictionary[Any, tuple[list[int], dict[str, str]]] = WeakKeyDictionary()


def _masters(state: State, params: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Names of the weights that each parameter can be the master of; parameters without any are left
    out."""
    weights: dict[tuple[Any, ...], list[str]] = {}
    dtypes: dict[torch.dtype, None] = {}
    for key, module in modules_in(in_order(state)):
        for name, p in named_parameters(module):
            if _is_one_memory(p):
                dtypes[p.dtype] = None
                alike = weights.setdefault((tuple(p.shape), *_sample(p, p.dtype)), [])
                alike.append(f"{key}.{name}")
    found: dict[str, list[str]] = {}
    for name, p in params.items() if weights else ():
        if not _is_one_memory(p):
            continue
        of = [w for d in dtypes for w in weights.get((tuple(p.shape), *_sample(p, d)), ())]
        if of:
            found[name] = of
    return found


def _is_one_memory(p: torch.Tensor) -> bool:
    return type(p) in PLAIN_TENSORS | {DTensor} and not p.is_meta and p.layout is torch.strided


def _sample(p: torch.Tensor, dtype: torch.dtype) -> tuple[torch.dtype, bytes]:
    local = local_of(p.detach())
    some = local.reshape(-1)[:SAMPLE] if local.is_contiguous() else local.flatten()[:SAMPLE]
    return dtype, some.to(dtype).cpu().contiguous().view(torch.uint8).numpy().tobytes()


def noted_masters(
    optimizer: Any, state: State, params: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """The weight of each parameter at the first save, `ALIKE` where several weights have its values; empty
    unless every parameter is a master."""
    ids = [id(p) for p in params.values()]
    known = _noted.get(optimizer) if isinstance(optimizer, Optimizer) else None
    if known is None or known[0] != ids:
        found = _masters(state, params)
        are_masters = found.keys() == params.keys() and any(len(of) == 1 for of in found.values())
        names = {n: of[0] if len(of) == 1 else ALIKE for n, of in found.items()}
        known = ids, names if are_masters else {}
        if isinstance(optimizer, Optimizer):
            _noted[optimizer] = known
    return known[1]


def are_proved(saved: Mapping[str, str], state: State, params: Mapping[str, torch.Tensor]) -> bool:
    """True if each parameter is the master of the weight that was noted for it."""
    if not saved or not params.keys() <= saved.keys():
        return False
    here = _masters(state, params)
    sure = [n for n in params if saved[n] != ALIKE and here.get(n) == [saved[n]]]
    return bool(sure) and all(
        here.get(name) and (saved[name] == ALIKE or saved[name] in here[name]) for name in params
    )
