"""A worker: a DeepSpeed engine that continues from what holdfast wrote in its universal format.

The same little model is trained by plain torch in one process first; every rank then sees the same batches.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS, MORE = 3, 50


class Model(nn.Module):
    """Odd sizes, so that partitions begin and end inside parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(17, 33), nn.Tanh(), nn.LayerNorm(33), nn.Linear(33, 5))
        self.scale = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(self.inner(x)).square().mean()


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 17, generator=torch.Generator().manual_seed(step))


def groups(model: nn.Module, one: bool) -> list[dict[str, Any]]:
    """One group, or two with hyper-parameters of their own."""
    wide = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    if one:
        return [{"params": wide + rest}]
    return [{"params": wide}, {"params": rest, "weight_decay": 0.3, "lr": 3e-3}]


def made(one: bool) -> tuple[Model, torch.optim.AdamW]:
    torch.manual_seed(7)
    model = Model()
    return model, torch.optim.AdamW(groups(model, one), lr=1e-2, weight_decay=0.1)


def train(model: Model, optim: torch.optim.AdamW, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        loss = model(batch(step))
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def main(url: str, out: str, stage: str, one: str) -> None:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    from deepspeed_on_cpu import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    model, optim = made(bool(int(one)))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,  # 1.0 is the default
        "zero_optimization": {"stage": int(stage)},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": True},
    }
    torch.manual_seed(99)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    engine, *_ = deepspeed.initialize(model=model, optimizer=optim, config=config)
    engine.load_checkpoint(url)
    state = {}
    for name, p in engine.module.named_parameters():
        state[name] = safe_get_full_fp32_param(p)
        for kind in ("exp_avg", "exp_avg_sq"):
            state[f"{name}.{kind}"] = safe_get_full_optimizer_state(p, kind)
    hyper = [
        {k: g[k] for k in ("lr", "weight_decay", "betas")} for g in engine.optimizer.param_groups
    ]
    losses = []
    for step in range(STEPS, STEPS + MORE):
        loss = engine(batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    if engine.global_rank == 0:
        torch.save(state, Path(out, "state.pt"))
        told = {"losses": losses, "hyper": hyper, "global_steps": engine.global_steps}
        Path(out, "told.json").write_text(json.dumps(told))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # gloo's threads outlive the interpreter otherwise


if __name__ == "__main__":
    main(*sys.argv[1:])
