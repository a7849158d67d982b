"""Optimizers around other optimizers: which optimizer has the state of a parameter.

`torch.distributed.optim.ZeroRedundancyOptimizer` (ZeRO-1 under DDP) serves all parameters, but an inner
optimizer steps those of this rank alone and has their state.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.base.errors import UsageError, warn_user
from holdfast.base.text import listed
from holdfast.live.state.ignoring import Ignored
from holdfast.live.state.observer import calls_hooks

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


def is_zero1(optimizer: Any) -> bool:
    """True if `optimizer` is torch's ZeroRedundancyOptimizer."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def params_of(optimizer: Any) -> list[Any]:
    """The parameters of an optimizer, group after group."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def stepping(optimizer: Optimizer) -> Optimizer:
    """The optimizer that makes the steps and has the states: ZeroRedundancyOptimizer's inner one."""
    return optimizer.optim if is_zero1(optimizer) else optimizer


def shown_optimizer(optimizer: Any) -> Any:
    """The optimizer whose states and groups a wrapper shows, as accelerate's does; else itself.

    The wrapper never called torch's __init__, so torch calls no hooks for its steps.
    """
    while isinstance(optimizer, Optimizer) and not calls_hooks(optimizer):
        inner = [v for v in vars(optimizer).values() if isinstance(v, Optimizer)]
        shown = [v for v in inner if v.state is optimizer.state]
        if len(shown) != 1:
            break
        optimizer = shown[0]
    return optimizer


def check_own_state(key: str, optimizer: Any, saved: Any, outside: Mapping[str, list[str]]) -> None:
    """UsageError for an optimizer whose state_dict() has more than states and groups, which are all that is
    saved, unless that is ignored: its own, or those of the optimizers that it was made around, which are
    `saved` in its place.  `outside`: attributes with tensors that nothing saves, which are refused, too.
    HoldfastWarning if it cannot be asked."""
    if not isinstance(optimizer, Optimizer) or is_zero1(shown_optimizer(optimizer)):
        return
    ignored = Ignored([("", optimizer)])
    lost: list[str] = []
    if _has_own_state_dict(optimizer):
        try:
            lost = _more_than_states(optimizer, saved)
        except Exception as error:  # whatever it is, the save can be made
            lost = []
            if not ignored.has("*"):
                warn_user(
                    f"{key!r}: whether the state_dict() of {type(optimizer).__name__} has anything beside "
                    f"states and groups, which are saved, it cannot say here ({type(error).__name__}: "
                    f"{error}); holdfast.ignore({key}, '*') says that it may be left out"
                )
    kept = [name for name in lost if not ignored.has(name)]
    if kept:
        names = ", ".join(map(repr, kept))
        raise UsageError(
            f"{key!r}: the state_dict() of {type(optimizer).__name__} has {names} beside states and "
            "groups, which are all that is saved of an optimizer",
            hint="hand it over as a value of the state, such as an object with state_dict() and "
            f"load_state_dict(), and say holdfast.ignore({key}, {names})",
        )
    unsaved = [path for name, paths in outside.items() if not ignored.has(name) for path in paths]
    if unsaved:
        name = next(n for n, paths in outside.items() if unsaved[0] in paths)
        raise UsageError(
            f"{key!r}: this {type(optimizer).__name__} keeps tensors in attributes that nothing saves "
            f"({listed(unsaved, 1)}): a restart would go on with those of a fresh build",
            hint=f"keep them in optimizer.state[p], or hand them over as a value of the state "
            f"({{..., {name!r}: {key}.{name}}}); holdfast.ignore({key}, {name!r}) does without them",
        )
    ignored.check(key, [*lost, *outside])


def _has_own_state_dict(optimizer: Optimizer) -> bool:
    """True if state_dict() may say more than torch's: by its class, by itself or by hooks."""
    method = getattr(optimizer, "state_dict", None)
    if getattr(method, "__func__", None) is not Optimizer.state_dict:
        return True
    hooks = vars(optimizer).get("_optimizer_state_dict_post_hooks")
    return bool(hooks or vars(optimizer).get("_optimizer_state_dict_pre_hooks"))


def _more_than_states(optimizer: Optimizer, saved: Optimizer) -> list[str]:
    """Names in an optimizer's state_dict() that are neither in saved groups nor in saved states.

    Of flat names, such as `state.layers.0.weight.exp_avg`, the last part says what it is.  States and
    groups may be said in a tree (`{"0": part.state_dict()}`): then each leaf has to be one that is saved.
    """
    said = optimizer.state_dict()
    groups, states = said.get("param_groups", []), said.get("state", {})
    hypers, kept = _keys(saved.param_groups), _keys(saved.state.values())
    held: dict[str, list[Any]] = {}
    for one in (*saved.param_groups, *saved.state.values()):
        for name, value in one.items() if isinstance(one, dict) else ():
            held.setdefault(str(name), []).append(value)
    more = set()
    for name, value in said.items():
        text = str(name)
        if text in ("param_groups", "state") or text.rpartition(".")[2] in hypers | kept:
            continue
        if not (isinstance(value, dict) and value and _is_held(value, held)):
            more.add(text)
    more |= _keys(groups) - hypers - {"param_names"}
    for state in states.values():
        for name, value in state.items() if isinstance(state, dict) else ():
            if name not in kept and not (isinstance(value, dict) and _is_held(value, held)):
                more.add(str(name))
    return sorted(more)


def _is_held(tree: Any, held: dict[str, list[Any]], name: str = "") -> bool:
    """True if every leaf of a tree is a value that is saved under its name."""
    if name in ("params", "param_names"):
        return True
    known = held.get(name, ())
    if any(value is tree or _is_alike(value, tree) for value in known):
        return True
    if isinstance(tree, dict):
        return all(_is_held(value, held, str(key)) for key, value in tree.items())
    if isinstance(tree, (list, tuple)) and tree:
        return all(isinstance(one, dict) and _is_held(one, held) for one in tree)
    return isinstance(tree, (list, tuple))


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        same = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return same and one.data_ptr() == other.data_ptr() and one.shape == other.shape
    return type(one) is type(other) and bool(one == other)


def _keys(dicts: Iterable[Any]) -> set[str]:
    return {str(key) for one in dicts if isinstance(one, dict) for key in one}
