"""Names of parameters that no module of the state has.

    torch.optim.Adam(model.named_parameters())        by the names that torch keeps in the groups
    torch.optim.Adam(agent.net.parameters())          by where the state_dict() of an agent in the state
                                                      has them: `agent.net.0.weight`
    torch.optim.Adam(model.parameters())              by position, `group0.3`: no name is to be had

A position identifies a parameter as long as the script makes the optimizer in the same order.  Where all
shapes differ, another order does not fit and is refused.  Where two shapes are equal, the order is
unproved: the first save warns, and a load refuses an order that it cannot prove
(`live.restore.matching_by_order`).

Names of wrappers at the front or inside are left out, as for modules: a script may be compiled, or wrapped
in DDP, at one start and not at the next.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch

from holdfast.base.errors import warn_user
from holdfast.live.sources import Group
from holdfast.live.state.named import Collected
from holdfast.live.state.optimizers import LiveOptimizer, NamedGroups, ParamNames, tensors_in
from holdfast.live.state.recognising import State, in_order, is_plain

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
        from holdfast.live.state.in_objects import names_in_objects

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
    masters: dict[str, str] = {}
    if found:
        from holdfast.live.state.masters_by_hand import noted

        masters = noted(optimizer.value, state, params)
    live.extras[key]["$optimizer"]["masters"] = masters
    if found and not masters and not live.before and not is_in_saved_order(optimizer.value):
        warn_user(
            f"{key!r}: parameters of this optimizer go by their positions, for nothing names them, and "
            f"{shown_alike(found)}: a restart will be refused, for in another order they would be swapped, "
            f"and nothing proves the order.  What to do: {WAYS_OUT}",
            notice="positions",
        )
