"""Ranks whose DeepSpeed models have experts of their own, or are stages of a pipeline.

`save` trains, saves, goes on, and checks that a restored engine goes on likewise; `load` restores on
another number of ranks and checks each value.  What is expected say DeepSpeed's own names on one rank.
"""

from __future__ import annotations

from deepspeed_on_cpu import deepspeed

# isort: split

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import logger
from torch import nn

import holdfast
from holdfast.errors import UsageError
from holdfast.integrations.deepspeed import attach

EXPERTS = "moe.deepspeed_moe.experts.deepspeed_experts"


class Net(nn.Module):
    """A layer of four experts between two plain ones."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.first = nn.Linear(16, 12)
        expert = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 12))
        self.moe = MoE(
            12, expert, num_experts=4, ep_size=ep_size, use_rts=False, capacity_factor=4.0
        )
        for number, one in enumerate(self.moe.deepspeed_moe.experts.deepspeed_experts):
            for p in one.parameters():  # DeepSpeed begins with equal ones
                nn.init.normal_(p, std=0.1 * (number + 1 + dist.get_rank()))
        self.last = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, balance, _ = self.moe(self.first(x).tanh())
        return self.last(x) + 0.01 * balance.to(x.dtype)


def config(stage: int, dtype: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
    }
    return found | ({"bf16": {"enabled": True}} if dtype == "bf16" else {})


def with_experts(options: dict[str, Any], seed: int) -> Any:
    torch.manual_seed(seed)
    model = Net(options["ep_size"])
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all"}
    )
    adam = torch.optim.AdamW(groups, lr=1e-2, foreach=False)
    given = config(options["stage"], options["dtype"])
    return deepspeed.initialize(model=model, optimizer=adam, config=given)[0]


def out(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return x @ layer.weight


def pipeline(options: dict[str, Any], seed: int) -> Any:
    torch.manual_seed(seed)
    bias = options.get("bias", False)
    model = PipelineModule(
        [
            TiedLayerSpec("embed", nn.Linear, 16, 24, bias=bias),
            nn.Tanh(),
            LayerSpec(nn.Linear, 24, 33),
            nn.Tanh(),
            LayerSpec(nn.Linear, 33, 24),
            TiedLayerSpec("embed", nn.Linear, 16, 24, bias=bias, forward_fn=out),
        ],
        num_stages=dist.get_world_size(),
        loss_fn=lambda x, y: (x - y).square().mean(),
    )
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    given = config(options["stage"], options["dtype"]) | {"gradient_accumulation_steps": 2}
    return deepspeed.initialize(model=model, optimizer=adam, config=given)[0]


BUILD = {"moe": with_experts, "pipe": pipeline}


def train(engine: Any, steps: int) -> list[float]:
    losses = []
    dtype = next(engine.module.parameters()).dtype
    for _ in range(steps):
        made = torch.Generator().manual_seed(engine.global_steps)
        if engine.pipeline_parallelism:
            losses.append(float(engine.train_batch(data_iter=batches(made, dtype))))
            continue
        x = torch.randn(16, 16, generator=made).chunk(2)[dist.get_rank()].to(dtype)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def batches(made: torch.Generator, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, ...]]:
    while True:
        yield torch.randn(8, 16, generator=made).to(dtype), torch.zeros(8, 16, dtype=dtype)


def own_weights(engine: Any, kind: str) -> dict[str, torch.Tensor]:
    """The model's own weights by their names in the whole model, as DeepSpeed's modules have them."""
    found = {}
    for name, value in engine.module.state_dict().items():
        if kind == "moe" and name.startswith(EXPERTS):
            number, rest = name.removeprefix(EXPERTS + ".").split(".", 1)
            moe = engine.module.moe
            first = 0 if moe.ep_size == 1 else dist.get_rank() * moe.num_local_experts
            name = f"{EXPERTS}.{first + int(number)}.{rest}"
        found[f"model.{name}"] = value
    return found


def check(engine: Any, kind: str, root: str) -> None:
    saved = holdfast.open(root)
    own = own_weights(engine, kind)
    assert own
    for name, value in own.items():
        assert torch.equal(
            value.float(), torch.from_numpy(saved.read(name)).to(value.dtype).float()
        )
    if dist.get_world_size() == 1:
        assert sorted(own) == sorted(n for n in saved.names() if n.startswith("model."))


def same(root: str, other: str) -> None:
    """Two roots have the same bytes under the same names."""
    one, two = holdfast.open(root), holdfast.open(other)
    assert sorted(one.names()) == sorted(two.names())
    for name in one.names():
        assert one.read(name).tobytes() == two.read(name).tobytes(), name


def save(options: dict[str, Any]) -> None:
    kind, root = options["kind"], options["root"]
    engine = BUILD[kind](options, 0)
    with attach(engine, root) as ckpt:
        train(engine, 3)
        engine.save_checkpoint(root, client_state={"epoch": 7})
        ckpt.wait()
        check(engine, kind, root)
        expected = train(engine, 3)
    engine = BUILD[kind](options, 1)
    with attach(engine, root):
        assert engine.load_checkpoint(root) == (f"{root}/global_step3", {"epoch": 7})
        check(engine, kind, root)
        assert train(engine, 3) == expected


def load(options: dict[str, Any]) -> None:
    """On another number of ranks; what is saved there is what was loaded."""
    kind, root = options["kind"], options["root"]
    engine = BUILD[kind](options, 1)
    with attach(engine, root):
        engine.load_checkpoint(root)
    check(engine, kind, root)
    assert engine.global_steps == 3
    state = {"model": engine, "optim": engine.optimizer, "client_state": {}}
    holdfast.save(options["again"], state, step=3)
    if dist.get_rank() == 0:
        same(root, options["again"])
    train(engine, 1)


def refuse(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"tied layer 'embed' .* \(bias\)"):
        attach(pipeline(options | {"bias": True}, 0), options["root"])


CASES = {"save": save, "load": load, "refuse": refuse}


def main(options: dict[str, Any]) -> None:
    logger.setLevel("ERROR")
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    Path(options["root"]).parent.mkdir(exist_ok=True)
    CASES[options["case"]](options)
    dist.destroy_process_group()
