"""DeepSpeed's models of which each rank has a part: experts of a layer, stages of a pipeline.

A rank numbers its experts from 0, so ranks have different experts under one name.  The rank in the layer's
group tells their numbers in the whole layer, by which experts are named:

    4 experts, ep_size 2      rank 0: 0 1    rank 1: 0 1   as DeepSpeed names them
                                      0 1            2 3   as the checkpoint does

So a checkpoint loads on any `ep_size` that divides the number of experts.  `PipelineModule` numbers its
layers over all stages itself.  A tied layer that two stages have is saved by the first of them alone.

Like `holdfast.live.state.deepspeed`, it imports nothing of DeepSpeed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed import get_rank

from holdfast.base.errors import UsageError
from holdfast.live.state.module_wrappers import parts

EXPERTS = "deepspeed_moe.experts.deepspeed_experts."
"""Path, in a layer of experts, of those that this rank has."""


def expert_names(module: nn.Module) -> dict[str, list[str]]:
    """Names in the whole model of tensors in experts, by their paths in this rank's module."""
    moe = sys.modules.get("deepspeed.moe.layer")
    found: dict[str, list[str]] = {}
    if moe is None:
        return found
    for prefix, layer in parts(module):
        group = layer.deepspeed_moe.ep_group if isinstance(layer, moe.MoE) else None
        first = 0 if group is None else get_rank(group) * layer.num_local_experts
        if first:
            for number, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
                here, there = (f"{prefix}{EXPERTS}{n}." for n in (number, first + number))
                found |= {here + path: [there + path] for path in _paths_in(expert)}
    return found


def _paths_in(module: nn.Module) -> Iterator[str]:
    for prefix, part in parts(module):
        for name in (*part._parameters, *part._buffers, "_extra_state"):
            yield prefix + name


def tied_copies(module: Any) -> frozenset[int]:
    """Ids of a stage's weights that an earlier stage of the pipeline saves, too.

    UsageError if a tied layer has weights that its stages do not tie: both would have one name.
    """
    found: set[int] = set()
    for key, tie in getattr(module, "tied_comms", {}).items():
        if len(tie["ranks"]) == 1:
            continue
        own = dict(tie["module"].named_parameters())
        apart = sorted(own.keys() - set(tie["weight_attr"]))
        if apart:
            raise UsageError(
                f"tied layer {key!r} has weights which its stages do not tie ({', '.join(apart)}): each "
                "stage trains its own under the same name",
                hint=f"name them in TiedLayerSpec(..., tied_weight_attr={sorted(own)!r})",
            )
        if torch.distributed.get_rank() != min(tie["ranks"]):
            found |= {id(p) for p in own.values()}
    return frozenset(found)
