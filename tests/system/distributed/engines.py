"""DeepSpeed engines for the tests: one model, every ZeRO stage and precision, on CPUs."""

from __future__ import annotations

from deepspeed_on_cpu import deepspeed

# isort: split

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import (
    logger,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
)
from torch import nn
from torch._utils import _unflatten_dense_tensors

import holdfast

ADAM = ("exp_avg", "exp_avg_sq")
ROWS = 12
"""Of a batch over all ranks: 1, 2 and 3 divide it."""

logger.setLevel("ERROR")
get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed doubts it of CPUs; torch computes it


class Kind(NamedTuple):
    """What an engine is configured with."""

    stage: int
    dtype: str
    way: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, (f"zero{self.stage}", self.dtype, self.way)))


KINDS = [Kind(stage, dtype) for stage in (0, 1, 2, 3) for dtype in ("fp32", "bf16", "fp16")]
BUILT = [Kind(0, "fp16", "fused"), Kind(2, "bf16", "cpuadam")]
"""With optimizers that DeepSpeed compiles: FP16_Optimizer, steps that are plain numbers."""
WAYS = [
    Kind(1, "bf16", "accumulate"),  # BF16_Optimizer
    Kind(2, "bf16", "robin"),
    Kind(2, "bf16", "aligned"),
    Kind(3, "fp32", "subgroups"),
    Kind(3, "bf16", "offload"),
]


class Net(nn.Module):
    """Odd sizes, a tied weight, a frozen one, a single number, a buffer, three dims."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(13, 7, bias=False)
        self.mix = nn.Parameter(torch.randn(3, 5, 7) / 4)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.body = nn.Sequential(nn.Linear(5, 31), nn.Tanh(), nn.Linear(31, 7))
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.once, self.again = nn.Linear(7, 7), nn.Linear(7, 7)
        self.again.weight = self.once.weight
        self.head = nn.Linear(7, 13)
        self.register_buffer("offset", torch.randn(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.einsum("bi,oki->bk", self.embed(x), self.mix) * self.scale
        x = self.frozen(self.body(x)) + self.offset.to(x.dtype)
        return self.head(self.again(self.once(x).tanh()))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups that differ in every hyper-parameter that matters."""
    named = dict(model.named_parameters())
    decayed = [p for p in named.values() if p.ndim > 1 and p.requires_grad]
    others = [p for p in named.values() if p.ndim <= 1 and p.requires_grad]
    return [
        {"params": decayed, "lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.9)},
        {"params": others, "lr": 3e-3, "weight_decay": 0.0, "betas": (0.9, 0.99)},
    ]


def build(kind: Kind, seed: int) -> tuple[Any, Net]:
    """An engine and the module inside it."""
    torch.manual_seed(seed)
    model = Net()
    zero: dict[str, Any] = {"stage": kind.stage}
    config: dict[str, Any] = {
        "train_batch_size": ROWS,
        "train_micro_batch_size_per_gpu": ROWS // dist.get_world_size(),
        "gradient_clipping": 1.0,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "steps_per_print": 10**9,
    }
    if kind.stage == 3:
        zero["stage3_param_persistence_threshold"] = 20
    if kind.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if kind.dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
    if kind.way == "accumulate":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if kind.way == "robin":
        zero["round_robin_gradients"] = True
    if kind.way == "aligned":
        zero["parameter_alignment"] = True
    if kind.way == "subgroups":
        zero["sub_group_size"] = 150
    if kind.way in ("cpuadam", "offload"):
        zero["offload_optimizer"] = {"device": "cpu"}
    if kind.way == "offload":
        zero["offload_param"] = {"device": "cpu"}
    optimizer = _optimizer(kind, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    return engine, model


def _optimizer(kind: Kind, model: nn.Module) -> torch.optim.Optimizer:
    if kind.way == "cpuadam":
        return deepspeed.ops.adam.DeepSpeedCPUAdam(groups(model))
    if kind.way == "fused":
        return deepspeed.ops.adam.FusedAdam(groups(model))
    return torch.optim.AdamW(groups(model), foreach=False)


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of a step's batch."""
    made = torch.Generator().manual_seed(1000 + step)
    x, y = torch.randn(ROWS, 13, generator=made), torch.randn(ROWS, 13, generator=made)
    rank, world = dist.get_rank(), dist.get_world_size()
    return x.chunk(world)[rank], y.chunk(world)[rank]


def state_of(engine: Any, kind: Kind) -> dict[str, Any]:
    """With the scheduler as a key of its own, or left to the engine."""
    state = {"model": engine, "optim": engine.optimizer}
    return state | ({"sched": engine.lr_scheduler} if kind.stage in (1, 2) else {})


def train(engine: Any, first: int, steps: int) -> list[float]:
    """Losses over all ranks of some steps."""
    losses = []
    dtype = next(p.dtype for p in engine.module.parameters())
    for step in range(first, first + steps):
        x, y = data(step)
        loss = (engine(x.to(dtype)).float() - y).square().mean()
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def gathered(engine: Any) -> dict[str, torch.Tensor]:
    """Every trainable parameter's master and Adam states, as DeepSpeed itself gathers them."""
    wrapper = engine.optimizer
    if hasattr(
        wrapper, "_hp_optimizer_states_linked"
    ):  # 0.19.8 links those of the first group alone
        wrapper._hp_optimizer_states_linked = False
        wrapper._lazy_init_hp_params_optimizer_state()
    masters = masters_here(wrapper)
    found = {}
    for name, p in engine.module.named_parameters():
        if not p.requires_grad:
            continue
        if id(p) in masters or engine.zero_optimization_stage() == 0:
            parts = masters.get(id(p)) or (p, *(wrapper.state[p][s] for s in ADAM))
        else:
            states = (safe_get_full_optimizer_state(p, s) for s in ADAM)
            parts = (safe_get_full_fp32_param(p), *states)
        names = (f"model.{name}", *(f"optim.{name}.{s}" for s in ADAM))
        found |= {n: part.detach().clone() for n, part in zip(names, parts)}
    return found


def masters_here(wrapper: Any) -> dict[int, tuple[torch.Tensor, ...]]:
    """Stage 0 in 16 bits: the masters and states that every rank has whole, by id of parameter."""
    found: dict[int, tuple[torch.Tensor, ...]] = {}
    state = wrapper.state
    for params, masters in zip(
        getattr(wrapper, "fp16_groups", ()), getattr(wrapper, "fp32_groups", ())
    ):
        for p, master in zip(params, masters):
            if isinstance(master, torch.nn.Parameter) or master.shape == p.shape:
                found[id(p)] = (master, *(state[master][s] for s in ADAM))
    for params, flat in zip(
        getattr(wrapper, "fp16_groups", ()), getattr(wrapper, "fp32_groups_flat", ())
    ):
        tensors = [flat, *(state[flat][s] for s in ADAM)]
        for p, *parts in zip(params, *(_unflatten_dense_tensors(t, params) for t in tensors)):
            found[id(p)] = tuple(parts)
    return found


def own_weights(engine: Any) -> dict[str, torch.Tensor]:
    """The model's own weights, as its forward pass sees them."""
    found = {}
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
            found[f"model.{name}"] = p.detach().clone()
    return found


def check_against(engine: Any, saved: holdfast.Checkpoint, *, states: bool = True) -> None:
    """The engine holds exactly the checkpoint: masters, states, and weights rounded from masters."""
    for name, value in gathered(engine).items():
        if states or name.startswith("model."):
            assert torch.equal(value, torch.from_numpy(saved.read(name))), name
    for name, weight in own_weights(engine).items():
        raw = saved.read(name)
        master = torch.from_numpy(raw.astype("float32"))
        assert torch.equal(weight, master.to(weight.dtype)), name
