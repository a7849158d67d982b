"""All that a run has, whole, by names that no layout changes: what is compared, bit for bit.

Gathered by torch alone.  Quantised states are gathered as the numbers that they stand for.  A plain tensor
beside a sharded parameter is this rank's own, unless it has the shape of the rank's part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .zoo import Trained

PLAIN = (torch.Tensor, torch.nn.Parameter)
OWN = "@rank"
"""Marks what is of one rank: it means nothing on another layout."""
Whole = dict[str, Any]


def gathered(run: Trained) -> Whole:
    """Everything, on every rank."""
    model = getattr(run.model, "module", run.model)
    names = {p: name for name, p in model.named_parameters()}
    mine: Whole = {name: _whole(p) for p, name in names.items()}
    for number, part in enumerate(run.parts):
        for group in part.param_groups:
            hyper = sorted(
                (k, _plain(v)) for k, v in group.items() if k not in ("params", "param_names")
            )
            for p in group["params"]:
                mine[f"{names[p]} group"] = repr(hyper)
                for path, value in _leaves(part.state.get(p, {}), names[p]):
                    name, value = _of_state(path, value, p)
                    mine[name] = value
        for key, value in part.state.items():
            if not isinstance(key, torch.Tensor):
                mine |= {f"part {number} {k}": _plain(v) for k, v in _leaves(value, str(key))}
    if not dist.is_initialized():
        return mine
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return {name: value for one in reversed(found) for name, value in one.items()}


def differences(a: Whole, b: Whole, *, same_layout: bool) -> list[str]:
    """Names of what is not the same bit for bit; of what one rank has, on the same layout alone."""
    names = sorted(a.keys() | b.keys())
    if not same_layout:
        names = [name for name in names if OWN not in name]
    return [name for name in names if name not in a or name not in b or not _same(a[name], b[name])]


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and repr(a) == repr(b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*raw)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for k, v in value.items():
            yield from _leaves(v, f"{path} {k}")
    elif isinstance(value, list | tuple):
        for i, v in enumerate(value):
            yield from _leaves(v, f"{path} {i}")
    else:
        yield path, value


def _of_state(path: str, value: Any, p: torch.Tensor) -> tuple[str, Any]:
    if not isinstance(value, torch.Tensor):
        return path, _plain(value)
    if isinstance(value, DTensor) or not isinstance(p, DTensor) or not value.ndim:
        return path, _whole(value)
    if value.shape == p._local_tensor.shape:
        return path, _whole(_like(value, p))
    if all(one.is_replicate() for one in p.placements):
        return path, _whole(value)
    return f"{path} {OWN}{dist.get_rank()}", _whole(value)


def _like(local: torch.Tensor, p: DTensor) -> DTensor:
    return DTensor.from_local(
        local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            local = tensor._local_tensor
            if type(local) not in PLAIN:
                tensor = _like(local.dequantize(), tensor)
            return tensor.full_tensor().detach().clone()
        if type(tensor) not in PLAIN:
            tensor = tensor.dequantize()
        return tensor.detach().clone()


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value
