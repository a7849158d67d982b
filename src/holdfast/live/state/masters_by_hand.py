"""Masters that a script keeps itself: float32 copies of weights, recognised by their values.

    masters = [p.detach().float() for p in model.parameters()]
    {"model": model, "optim": torch.optim.AdamW(masters)}

Masters have no names, but each, rounded, equals a weight of the model: right after they are made, and after
each step that writes them back.  So the first save notes the weight of each master.  A load compares values
again before anything is read: if each is the master of the same weight, their order is proved.  Weights
with equal values (biases of zeros) prove nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.live.state.modules import named_parameters
from holdfast.live.state.placed import local_of
from holdfast.live.state.recognising import State, in_order, modules_in
from holdfast.live.state.tensor_kinds import PLAIN_TENSORS

SAMPLE = 256
"""Number of elements of a weight that are compared."""
ALIKE = ""
"""In the place of a name: several weights have these values."""

_known: WeakKeyDictionary[Any, tuple[list[int], dict[str, str]]] = WeakKeyDictionary()


def masters(state: State, params: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Names of the weights that each parameter can be the master of; parameters without any are left
    out."""
    weights: dict[tuple[Any, ...], list[str]] = {}
    dtypes: dict[torch.dtype, None] = {}
    for key, module in modules_in(in_order(state)):
        for name, p in named_parameters(module):
            if _is_plain(p):
                dtypes[p.dtype] = None
                alike = weights.setdefault((tuple(p.shape), *_sample(p, p.dtype)), [])
                alike.append(f"{key}.{name}")
    found: dict[str, list[str]] = {}
    for name, p in params.items() if weights else ():
        if not _is_plain(p):
            continue
        of = [w for d in dtypes for w in weights.get((tuple(p.shape), *_sample(p, d)), ())]
        if of:
            found[name] = of
    return found


def _is_plain(p: torch.Tensor) -> bool:
    return type(p) in PLAIN_TENSORS | {DTensor} and not p.is_meta and p.layout is torch.strided


def _sample(p: torch.Tensor, dtype: torch.dtype) -> tuple[torch.dtype, bytes]:
    local = local_of(p.detach())
    some = local.reshape(-1)[:SAMPLE] if local.is_contiguous() else local.flatten()[:SAMPLE]
    return dtype, some.to(dtype).cpu().contiguous().view(torch.uint8).numpy().tobytes()


def noted(optimizer: Any, state: State, params: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The weight of each parameter at the first save, `ALIKE` where several weights have its values; empty
    unless every parameter is a master."""
    ids = [id(p) for p in params.values()]
    known = _known.get(optimizer) if isinstance(optimizer, Optimizer) else None
    if known is None or known[0] != ids:
        found = masters(state, params)
        are_masters = found.keys() == params.keys() and any(len(of) == 1 for of in found.values())
        names = {n: of[0] if len(of) == 1 else ALIKE for n, of in found.items()}
        known = ids, names if are_masters else {}
        if isinstance(optimizer, Optimizer):
            _known[optimizer] = known
    return known[1]


def are_proved(saved: Mapping[str, str], state: State, params: Mapping[str, torch.Tensor]) -> bool:
    """True if each parameter is the master of the weight that was noted for it."""
    if not saved or not params.keys() <= saved.keys():
        return False
    here = masters(state, params)
    sure = [n for n in params if saved[n] != ALIKE and here.get(n) == [saved[n]]]
    return bool(sure) and all(
        here.get(name) and (saved[name] == ALIKE or saved[name] in here[name]) for name in params
    )
