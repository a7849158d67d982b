"""Names of parameters inside objects of the state: their paths in the object's `state_dict()`.

    {"agent": agent, "optim": torch.optim.Adam(agent.net.parameters())}      agent.net.0.weight

A `state_dict()` has parameters themselves, or others that lie in their memory with their shape, as what
nn.Module's gives.  It may be slow, or talk to other ranks: it is asked once, for parameters that nothing
else names.  Loaders are not asked, for that may draw from them; nor is one that cannot be asked yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from holdfast.core.format.extras import MAX_EXTRAS_DEPTH
from holdfast.live.state.own_state_dicts import memory_place
from holdfast.live.state.recognising import (
    State,
    in_order,
    is_loader,
    is_optimizer,
    is_stateful,
    stages,
)
from holdfast.live.state.rng import Rng

LEAVES = (int, float, complex, str, bytes, type(None))

_known: Any = WeakTensorKeyDictionary()
"""By parameter: the keys of the state that was searched, and the name, which is empty if none was found."""


def names_in_objects(state: State, params: Sequence[torch.Tensor]) -> dict[int, str]:
    """Names of parameters, by id, that objects of the state have."""
    keys = {*state}
    if any(_known.get(p, (None, ""))[0] != keys for p in params):
        found: dict[Any, str] = {}
        for key, value in in_order(state).items():
            if not isinstance(value, (torch.Tensor, Rng)) and stages(value) is None:
                for name, t in _asked(value, key):
                    found.setdefault(memory_place(t), name)
        found.pop(None, None)
        for p in params:
            _known[p] = keys, found.get(memory_place(p), "")
    return {id(p): name for p in params if (name := _known[p][1])}


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
