"""Checkpoints of pipeline and tensor parallelism, made by DeepSpeed's PipelineModule: for test_deepspeed.

    torchrun --nproc-per-node=8 -m formats.read.deepspeed_grid OUT PP TP DP STAGE PRECISION [apart]

Every rank writes its own parameters, by DeepSpeed's own access to them, to `OUT/held/<pp>-<tp>.pt`.
"""

from __future__ import annotations

from deepspeed_on_cpu import deepspeed

# isort: split

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn
from torch.nn import functional

from formats.read.deepspeed_sources import STEPS, truth

VOCAB, PADDED, WIDTH, Q, KV, INNER = 11, 12, 6, 8, 4, 10
BATCH, LENGTH = 2, 3


class Copy(torch.autograd.Function):
    """To the ranks of a tensor-parallel group: gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=GRID.group)
        return grad


class Sum(torch.autograd.Function):
    """From them: values are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=GRID.group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Gather(torch.autograd.Function):
    """Their last dims side by side."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(GRID.tp)]
        dist.all_gather(parts, x.contiguous(), group=GRID.group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.chunk(GRID.tp, -1)[GRID.tp_rank]


class Grid:
    """Where this rank stands."""

    tp = 1
    tp_rank = 0
    group: Any = None


GRID = Grid()


def part(full: torch.Tensor, dim: int, sizes: tuple[int, ...] | None = None) -> nn.Parameter:
    """This rank's part of a tensor; of fused ones, its part of each."""
    pieces = full.split(sizes or (full.shape[dim],), dim)
    mine = torch.cat([p.chunk(GRID.tp, dim)[GRID.tp_rank] for p in pieces], dim)
    parameter = nn.Parameter(mine.clone())
    parameter.model_parallel = parameter.tensor_model_parallel = GRID.tp > 1
    return parameter


class Embedding(nn.Module):
    """Rows over the ranks, padded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = part(torch.randn(PADDED, WIDTH) / 3, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = len(self.weight)
        mine = x - rows * GRID.tp_rank
        inside = (mine >= 0) & (mine < rows)
        found = functional.embedding(mine.clamp(0, rows - 1), self.weight)
        return Sum.apply(found * inside[..., None])


def logits(layer: Embedding, x: torch.Tensor) -> torch.Tensor:
    return Gather.apply(functional.linear(Copy.apply(x), layer.weight))[..., :VOCAB]


class Block(nn.Module):
    """Norm; fused q, k, v of unequal widths cut by columns, a projection by rows; a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = part(torch.randn(Q + 2 * KV, WIDTH) / 3, 0, (Q, KV, KV))
        self.out = part(torch.randn(WIDTH, Q) / 3, 1)
        self.bias = nn.Parameter(torch.randn(WIDTH) / 3)
        self.gate = part(torch.randn(2 * INNER, WIDTH) / 3, 0, (INNER, INNER))
        self.down = part(torch.randn(WIDTH, INNER) / 3, 1)
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = functional.linear(Copy.apply(self.norm(x)), self.qkv)
        q, k, v = h.split((Q // GRID.tp, KV // GRID.tp, KV // GRID.tp), -1)
        mixed = q * torch.cat([k, v], -1)
        x = x + Sum.apply(functional.linear(mixed, self.out)) + self.bias
        a, b = functional.linear(Copy.apply(x), self.gate).chunk(2, -1)
        return x + Sum.apply(functional.linear(torch.relu(a) * b, self.down))


def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.float().reshape(-1, VOCAB), labels.reshape(-1))


INFO = {
    "universal_checkpoint_version": 0.4,
    "original_vocab_size": VOCAB,
    "padded_vocab_size": PADDED,
    "vocabulary_parameter_patterns": [r"tied_modules\.embed\.weight"],
    "pipeline_replicated_parameter_patterns": [r"tied_modules\.embed\.weight"],
    "tp_replicated_parameter_patterns": [r"\d+\.norm\.(weight|bias)", r"\d+\.bias", r"\d+\.weight"],
    "parameter_with_row_parallelism_patterns": [r"\d+\.out", r"\d+\.down"],
    "parameter_with_2_sub_params_cat_dim_0": [r"\d+\.gate"],
    "parameter_with_sub_params": [
        {"patterns": [r"\d+\.qkv"], "shape": ((Q, KV, KV), WIDTH), "partition_dim": 0}
    ],
}


def info(tp: int) -> dict[str, Any]:
    widths = [[n // tp] * tp for n in (Q, KV, KV)]
    return {**INFO, "sub_param_shard_widths": {r"\d+\.qkv": widths}}


def averaged(info: dict[str, Any]) -> dict[str, Any]:
    """As a model says it whose copies are updated apart."""
    copies = info["tp_replicated_parameter_patterns"]
    return info | {"tp_replicated_parameter_patterns": [], "parameter_to_average_patterns": copies}


def main() -> None:
    out = Path(sys.argv[1])
    pp, tp, dp, stage = map(int, sys.argv[2:6])
    deepspeed.init_distributed("gloo")
    topology = PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=dp)
    at = topology.get_coord(dist.get_rank())
    for ranks in topology.get_axis_comm_lists("model") if tp > 1 else []:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            GRID.group = group
    if tp == 1:
        for r in range(dist.get_world_size()):
            group = dist.new_group([r])
            GRID.group = group if r == dist.get_rank() else GRID.group
    GRID.tp, GRID.tp_rank = tp, at.model
    torch.manual_seed(0)
    layers = [
        TiedLayerSpec("embed", Embedding, tied_weight_attr="weight"),
        *(LayerSpec(Block) for _ in range(3)),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("embed", Embedding, forward_fn=logits, tied_weight_attr="weight"),
    ]
    net = PipelineModule(
        layers, topology=topology, loss_fn=loss, partition_method="uniform", seed_layers=True,
        base_seed=5,
    )  # fmt: skip
    trained = list(net.parameters())
    what = info(tp)
    if sys.argv[7:] == ["apart"]:  # so are the ranks' norms and biases from the beginning
        what = averaged(what)
        for p in trained:
            p.data += 0.1 * at.model * (p.ndim == 1)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    if sys.argv[6] != "fp32":
        config[sys.argv[6]] = {"enabled": True}
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)

    def batches() -> Any:
        generator = torch.Generator().manual_seed(at.data)
        while True:
            x = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
            yield x, torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)

    data = batches()
    for _ in range(STEPS):
        engine.train_batch(data)
    engine.save_checkpoint(str(out / "save"), client_state={"universal_checkpoint_info": what})
    held = truth(engine, ("exp_avg", "exp_avg_sq")) if stage or sys.argv[6] == "bf16" else {}
    if at.data == 0:
        (out / "held").mkdir(parents=True, exist_ok=True)
        module = {k: v.clone() for k, v in engine.module.state_dict().items()}
        torch.save({"held": held, "module": module}, out / "held" / f"{at.pipe}-{at.model}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        from formats.read.deepspeed_sources import universal

        universal(out, f"global_step{STEPS}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
