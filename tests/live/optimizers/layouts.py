"""The layouts of the matrix: how one process or two hold the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, OUT = 128, 64
"""Shards of matrices have at least 4096 elements, fewer are not quantised by optimizers that do so."""
CUTS = {"up": ColwiseParallel, "down": RowwiseParallel}


def whole(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential()
    model.add_module("up", nn.Linear(WIDTH, WIDTH))
    model.add_module("act", nn.Tanh())
    model.add_module("down", nn.Linear(WIDTH, OUT))
    return model


def _ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def _fsdp(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    return model


def _tp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return parallelize_module(model, mesh, {name: cut() for name, cut in CUTS.items()})


def _fsdp_tp(model: nn.Module) -> nn.Module:
    sizes = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {name: cut() for name, cut in CUTS.items()})
    fully_shard(model, mesh=mesh["dp"])
    return model


def _pipeline(model: nn.Module) -> nn.Module:
    """The first layer on rank 0, the last on rank 1; each is trained by itself here."""
    stage = nn.Sequential()
    name = "up" if dist.get_rank() == 0 else "down"
    stage.add_module(name, model.get_submodule(name))
    return stage


@dataclass(frozen=True)
class Layout:
    ranks: int
    apply: Callable[[nn.Module], nn.Module]

    def build(self, seed: int) -> nn.Module:
        return self.apply(whole(seed))


LAYOUTS = {
    "single": Layout(1, lambda model: model),
    "DDP": Layout(2, _ddp),
    "FSDP2": Layout(2, _fsdp),
    "TP": Layout(2, _tp),
    "FSDP2 x TP": Layout(2, _fsdp_tp),
    "pipeline": Layout(2, _pipeline),
}
TARGETS = {
    "single": ("single", "FSDP2", "TP"),
    "DDP": ("DDP", "single", "FSDP2"),
    "FSDP2": ("FSDP2", "single", "TP"),
    "TP": ("TP", "single", "FSDP2"),
    "FSDP2 x TP": ("FSDP2 x TP", "single", "FSDP2"),
    "pipeline": ("pipeline", "single", "FSDP2"),
}
"""Layouts that each layout's checkpoints are loaded into: its own, and two others."""
