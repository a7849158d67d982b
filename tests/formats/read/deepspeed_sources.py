"""Checkpoints of real DeepSpeed engines, with what they held: started under torchrun by test_deepspeed.

    torchrun --nproc-per-node=2 -m formats.read.deepspeed_sources OUT CASE...

A case trains a small model for three steps, saves it to `OUT/<case>/save`, and writes beside it

    truth.pt      what the engine itself says of every parameter and state, gathered (`safe_get_full_...`)
    fp32.pt       what DeepSpeed's zero_to_fp32 makes of the files
    universal/    what its ds_to_universal makes of them
    losses.pt     the losses of the steps after the save
"""

from __future__ import annotations

from deepspeed_on_cpu import deepspeed

# isort: split

import copy
import io
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed import utils as ds
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.config import ZeroStageEnum
from torch import nn

STEPS, MORE = 3, 3
VOCAB, WIDTH, INNER = 11, 7, 13


class Net(nn.Module):
    """Sizes that no number of ranks divides; a tied, a frozen, and an empty parameter; buffers."""

    def __init__(self, rows: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.frozen = nn.Parameter(torch.randn(5, WIDTH), requires_grad=False)
        self.one = nn.Linear(WIDTH, INNER)
        self.norm = nn.LayerNorm(INNER)
        self.two = nn.Linear(INNER, WIDTH)
        self.cube = nn.Parameter(torch.randn(rows, 5, WIDTH) / 10)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.count += 1
        h = self.embed(x).mean(1)
        h = (
            self.two(torch.relu(self.norm(self.one(h))))
            + self.cube.sum((0, 1))
            + self.frozen.sum(0)
        )
        return nn.functional.cross_entropy(self.head(h).float(), y)


class Lion(torch.optim.Optimizer):
    """A state that is not Adam's, and one that belongs to no element."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                    state["blocks"] = torch.zeros(3)
                    state["calls"] = 0
                state["calls"] += 1
                state["blocks"] += p.grad.abs().max()
                state["norm"] = float(p.grad.norm())
                b1, b2 = group["betas"]
                m = state["momentum"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * (b1 * m + (1 - b1) * p.grad).sign())
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2)


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)


STATES = {adamw: ("exp_avg", "exp_avg_sq"), sgd: ("momentum_buffer",), Lion: ("momentum",)}


@dataclass(frozen=True)
class Case:
    """An engine: DeepSpeed's configuration, and what differs from the usual model and optimizer."""

    config: dict[str, Any]
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    groups: int = 2
    tag: str | None = None
    client: bool = False
    """Whether a client_state is saved, and a later step as well."""
    rows: int = 3
    fused: bool = False
    """Take DeepSpeed's wrapper of fused optimizers, which flattens groups, for torch's AdamW."""


def zero(stage: int, precision: str = "fp32", **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {"zero_optimization": {"stage": stage, **more}}
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "fp16":
        config[precision] |= {"initial_scale_power": 16, "loss_scale_window": 2, "hysteresis": 1}
        config["gradient_clipping"] = 1.0
    return config


CASES = {
    "z0": Case(zero(0), client=True),
    "z0-bf16": Case(zero(0, "bf16"), groups=1),
    "z0-fp16": Case(zero(0, "fp16")),
    "z0-fused": Case(zero(0, "fp16"), fused=True),
    "z1": Case(zero(1), client=True),
    "z2": Case(zero(2), client=True),
    "z3": Case(zero(3), client=True),
    "z1-bf16": Case(zero(1, "bf16")),
    "z2-bf16": Case(zero(2, "bf16"), tag="best"),
    "z3-bf16": Case(zero(3, "bf16")),
    "z2-fp16": Case(zero(2, "fp16")),
    "z3-fp16": Case(zero(3, "fp16")),
    "z2-robin": Case(zero(2, round_robin_gradients=True)),
    "z2-offload": Case(zero(2, offload_optimizer={"device": "cpu"})),
    "z3-offload": Case(
        zero(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})
    ),
    "z1-elastic": Case(zero(1, elastic_checkpoint=True)),
    "z2-aligned": Case(zero(2, "bf16", parameter_alignment=True, contiguous_gradients=True)),
    "z3-small": Case(
        zero(3, sub_group_size=100, stage3_gather_16bit_weights_on_model_save=True), groups=3
    ),
    "z2-lion": Case(zero(2), Lion),
    "z3-lion": Case(zero(3), Lion),
    "z3-sgd": Case(zero(3), sgd),
    "z2-wide": Case(zero(2), rows=20_000),
    "z2-one": Case(zero(2), groups=1),
    "z1-immediate": Case(
        zero(1, "bf16") | {"bf16": {"enabled": True, "immediate_grad_update": True}}
    ),
}


def groups_of(net: nn.Module, count: int) -> list[dict[str, Any]]:
    """Weights and biases apart, each with hyper-parameters of its own."""
    trained = [p for p in net.parameters() if p.requires_grad]
    if count == 1:
        return [{"params": trained}]
    decay, rest = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim == 1]
    if count == 3:
        return [
            {"params": decay[:1], "weight_decay": 0.3, "lr": 3e-2},
            {"params": decay[1:], "weight_decay": 0.1, "lr": 1e-2},
            {"params": rest, "weight_decay": 0.0, "lr": 2e-2},
        ]
    return [
        {"params": decay, "weight_decay": 0.1, "lr": 1e-2},
        {"params": rest, "weight_decay": 0.0, "lr": 2e-2},
    ]


CLIENT = {
    "mine": [1, (2.5, None)],
    "file": io.BytesIO(b"x"),
    "noise": torch.arange(3.0),
    "epoch": 7,
    "random": np.array([3, 1, 2]),
    "args": Namespace(lr=0.5, dtype=torch.float16, stage=ZeroStageEnum.gradients),
}


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randint(0, VOCAB, (4, 6), generator=generator)
    return x, torch.randint(0, VOCAB, (4,), generator=generator)


def engine_of(case: Case) -> Any:
    torch.manual_seed(0)
    net = Net(case.rows)
    optimizer = case.optimizer(groups_of(net, case.groups))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        **copy.deepcopy(case.config),
    }
    fused = deepspeed.runtime.engine.FusedAdam
    if case.fused:
        deepspeed.runtime.engine.FusedAdam = torch.optim.AdamW
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    deepspeed.runtime.engine.FusedAdam = fused
    return engine


def train(engine: Any, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        loss = engine(*batch(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    return losses


def truth(engine: Any, states: tuple[str, ...]) -> dict[str, Any]:
    """What the engine says of its parameters: gathered by DeepSpeed's own functions."""
    found: dict[str, Any] = {}
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._hp_optimizer_states_linked = (
            False  # else the first group's alone are known
        )
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, p in engine.module.named_parameters():
        if not p.requires_grad:
            continue
        one = {"fp32": ds.safe_get_full_fp32_param(p)}
        for state in states:
            one[state] = ds.safe_get_full_optimizer_state(p, state)
        found[name] = {k: v.detach().clone() for k, v in one.items()}
    return found


def plain_truth(engine: Any) -> dict[str, Any]:
    """As `truth`, without ZeRO: the optimizer's own states, by parameter."""
    states = engine.optimizer.state if isinstance(engine.optimizer, torch.optim.Optimizer) else {}
    return {
        name: {"fp32": p.detach().clone(), **{k: v.clone() for k, v in states[p].items()}}
        for name, p in engine.module.named_parameters()
        if p in states
    }


def run(name: str, out: Path) -> None:
    case, here = CASES[name], out / name
    engine = engine_of(case)
    train(engine, 0, STEPS)
    engine.save_checkpoint(
        str(here / "save"), tag=case.tag, client_state=CLIENT if case.client else {}
    )
    held = plain_truth(engine) if name.startswith("z0") else truth(engine, STATES[case.optimizer])
    net = {k: v.detach().clone() for k, v in engine.module.state_dict().items()}
    losses = train(engine, STEPS, MORE)
    if case.client:
        engine.save_checkpoint(str(here / "later"))
    engine.destroy()
    if dist.get_rank() == 0:
        torch.save({"held": held, "module": net}, here / "truth.pt")
        torch.save(losses, here / "losses.pt")
        if not name.startswith("z0"):
            convert(here, case.tag or f"global_step{STEPS}")
    dist.barrier()


def convert(here: Path, tag: str) -> None:
    """DeepSpeed's own tools."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    torch.save(get_fp32_state_dict_from_zero_checkpoint(str(here / "save")), here / "fp32.pt")
    universal(here, tag)


def universal(here: Path, tag: str) -> None:
    """ds_to_universal.  It cannot convert all: then why is in universal.txt."""
    from deepspeed.checkpoint import ds_to_universal

    options = Namespace(
        input_folder=str(here / "save" / tag),
        output_folder=str(here / "universal" / tag),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    try:
        ds_to_universal.main(options)
    except Exception as error:
        (here / "universal.txt").write_text("".join(traceback.format_exception(error)))


def main() -> None:
    out, names = Path(sys.argv[1]), sys.argv[2:]
    get_accelerator().is_fp16_supported = lambda: True  # of speed, not of values
    deepspeed.init_distributed("gloo")
    for name in names:
        try:
            run(name, out)
        except Exception:
            print("FAILED", name, traceback.format_exc(), flush=True)
            raise
        print("made", name, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
