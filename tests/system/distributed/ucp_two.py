"""Worker, 2 ranks: plain torch, DeepSpeed's engines and Megatron-Core, each from one 3D checkpoint.

Each layout is trained without interruption first; its checkpoint is a source, its losses are the noise.
"""

from __future__ import annotations

from deepspeed_on_cpu import deepspeed

# isort: split

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import (
    logger,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from . import ucp_gpt as gpt
from .cases import run_all
from .megatron_cpu import on_cpu
from .ucp_cases import restored, uninterrupted
from .ucp_megatron import DENSE, MOE, MOE_SOURCE, SOURCE, Job

WORLD = 2


def ddp() -> gpt.Plain:
    return _over_data(nn.parallel.DistributedDataParallel(gpt.Gpt()))


def fsdp2(experts: bool = False) -> gpt.Plain:
    model = gpt.Gpt(experts=experts)
    for layer in model.decoder.layers:
        fully_shard(layer)
    fully_shard(model)
    return _over_data(model)


def _over_data(model: nn.Module) -> gpt.Plain:
    return gpt.Plain(model, gpt.adamw(model), dist.get_rank(), WORLD)


def tp() -> gpt.Plain:
    """By torch's DTensor.  Gate and up are one product, of which each rank needs matching halves: its
    output is gathered."""
    model = gpt.Gpt()
    layer = {
        "self_attention.linear_qkv": ColwiseParallel(),
        "self_attention.linear_proj": RowwiseParallel(),
        "mlp.linear_fc1": ColwiseParallel(output_layouts=Replicate()),
        "mlp.linear_fc2": RowwiseParallel(input_layouts=Replicate()),
    }
    plan: dict[str, Any] = {"embedding.word_embeddings": RowwiseParallel(input_layouts=Replicate())}
    for i in range(gpt.LAYERS):
        plan |= {f"decoder.layers.{i}.{name}": how for name, how in layer.items()}
    parallelize_module(model, init_device_mesh("cpu", (WORLD,)), plan)
    return gpt.Plain(model, gpt.adamw(model))


class Zero:
    """A DeepSpeed engine at one stage of ZeRO."""

    def __init__(self, stage: int) -> None:
        model = gpt.Gpt()
        config = {
            "train_batch_size": gpt.BATCH,
            "train_micro_batch_size_per_gpu": gpt.BATCH // WORLD,
            "gradient_clipping": gpt.CLIP,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 40},
            "steps_per_print": 10**9,
        }
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=gpt.adamw(model), config=config
        )
        self.state = {"model": self.engine, "optim": self.engine.optimizer}

    def run(self, first: int, steps: int) -> list[float]:
        return [self.step(i) for i in range(first, first + steps)]

    def step(self, number: int) -> float:
        loss = self.engine(gpt.tokens(number).chunk(WORLD)[dist.get_rank()])
        self.engine.backward(loss)
        self.engine.step()
        return gpt.mean(loss.detach(), WORLD)

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder))

    def gathered(self) -> dict[str, torch.Tensor]:
        wrapper = self.engine.optimizer
        if hasattr(wrapper, "_hp_optimizer_states_linked"):  # 0.19 links those of one group alone
            wrapper._hp_optimizer_states_linked = False
            wrapper._lazy_init_hp_params_optimizer_state()
        found = {}
        for name, p in self.engine.module.named_parameters():
            found[f"model.{name}"] = safe_get_full_fp32_param(p).clone()
            for state in gpt.ADAM:
                whole = safe_get_full_optimizer_state(p, state)
                found[f"optim.{name}.{state}"] = whole.clone()
        return found


PLAIN = {
    "ddp2": ddp,
    "fsdp2": fsdp2,
    "tp2_dtensor": tp,
    "zero1": partial(Zero, 1),
    "zero2": partial(Zero, 2),
    "zero3": partial(Zero, 3),
}
MEGATRON = {
    "tp2_sp": partial(Job, replace(DENSE, pp=1, sequence_parallel=True, micro=gpt.BATCH)),
    "pp2": partial(Job, replace(DENSE, tp=1, micro=4)),
    "dp2_zero1": partial(Job, replace(DENSE, tp=1, pp=1, micro=4)),
}
EXPERTS = {
    "moe_fsdp2": partial(fsdp2, experts=True),
    "moe_ep2": partial(Job, replace(MOE, tp=1, pp=1, sequence_parallel=False)),
}
CASES = [
    case
    for layouts, source in ((PLAIN, SOURCE), (MEGATRON, SOURCE), (EXPERTS, MOE_SOURCE))
    for name, build in layouts.items()
    for case in (uninterrupted(name, build), restored(name, build, source))
] + [restored("pp2", MEGATRON["pp2"], "pp2")]
"""Megatron-Core's arrangements end process groups that DeepSpeed remembers, so they come behind it.
The last stays on its own layout."""

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logger.setLevel("ERROR")
    on_cpu()
    run_all(CASES)
