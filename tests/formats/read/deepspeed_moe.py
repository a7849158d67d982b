"""Checkpoints of DeepSpeed's mixture of experts: for test_deepspeed.

    torchrun --nproc-per-node=4 -m formats.read.deepspeed_moe OUT STAGE EXPERT_RANKS PRECISION

Every rank writes its own parameters, by DeepSpeed's own access to them, to `OUT/held/<rank>.pt`.
"""

from __future__ import annotations

from deepspeed_on_cpu import deepspeed

# isort: split

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import groups
from torch import nn

from formats.read.deepspeed_sources import STEPS, plain_truth, truth

WIDTH, EXPERTS = 6, 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 5)
        self.down = nn.Linear(5, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(WIDTH, Expert(), num_experts=EXPERTS, ep_size=ranks, k=1, min_capacity=8)
        self.more = MoE(WIDTH, Expert(), num_experts=EXPERTS, ep_size=ranks, k=1, min_capacity=8)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = x + self.moe(x)[0]
        x = x + self.more(x)[0]
        return self.last(x).float().square().mean()


def main() -> None:
    out, stage, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    deepspeed.init_distributed("gloo")
    torch.manual_seed(dist.get_rank())
    net = Net(ranks)
    params: Any = {"params": list(net.parameters()), "name": "all", "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(
        split_params_into_different_moe_groups_for_optimizer(params), lr=1e-2
    )
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    if sys.argv[4] != "fp32":
        config[sys.argv[4]] = {"enabled": True}
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        x = torch.randn(8, WIDTH, generator=generator)
        engine.backward(engine(x.to(next(net.parameters()).dtype)))
        engine.step()
    engine.save_checkpoint(str(out / "save"))
    held = truth(engine, ("exp_avg", "exp_avg_sq")) if stage else plain_truth(engine)
    (out / "held").mkdir(parents=True, exist_ok=True)
    module = {k: v.clone() for k, v in engine.module.state_dict().items()}
    where = groups._get_expert_parallel_rank(net.moe.expert_group_name)
    torch.save(
        {"held": held, "module": module, "expert_rank": where},
        out / "held" / f"{dist.get_rank()}.pt",
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
