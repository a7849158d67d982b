"""A loop as that of torchtitan's Trainer, with its real parts: by settings in JSON.

The Trainer itself needs CUDA and Triton.  Here are its model parts (two on each rank, as interleaved
pipelines have), OptimizersContainer, LRSchedulersContainer, ParallelAwareDataloader, the train state, and a
checkpoint manager that `Config.build` makes as the Trainer does.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.optimizer.optimizer import ParamGroupConfig

from holdfast.errors import HoldfastWarning
from holdfast.integrations.torchtitan import HoldfastCheckpointManager
from integrations.trainers.weights import digest


@dataclass
class Settings:
    """What a run of this script does."""

    kind: str = "single"
    theirs: bool = False
    """Whether torchtitan's own manager saves."""
    steps: int = 24
    config: dict[str, Any] = field(default_factory=dict)
    """Options of the manager's Config."""
    seed: bool = False
    single: bool = False
    """Whether there is one optimizer for all parameters: records are of one."""

    def text(self) -> str:
        return json.dumps(asdict(self))


class Part(nn.Module):
    def __init__(self, number: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(inputs, outputs)})
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(next(iter(self.layers.values()))(x))


class Numbers(IterableDataset):  # type: ignore[type-arg]
    """Batches of a rank, with noise of the default generator; its position is its state."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at = rank, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            made = torch.Generator().manual_seed(1000 * self.at + self.rank)
            self.at += 1
            yield torch.randn(8, generator=made) + 0.1 * torch.randn(8)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Trained:
    """The state of a Trainer."""

    step = ntokens_seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


def parts_of(kind: str, mesh: Any) -> list[nn.Module]:
    parts: list[nn.Module] = [Part(0, 8, 16), Part(1, 16, 4)]
    for part in parts if kind != "single" else ():
        fully_shard(part, mesh=mesh) if kind == "fsdp2" else replicate(part, device_mesh=mesh)
    return parts


def optimizers_of(parts: list[nn.Module], *, single: bool) -> OptimizersContainer:
    groups = [
        ParamGroupConfig(
            pattern=r"bias$",
            optimizer_name="AdamW",
            optimizer_kwargs={"lr": 1e-3, "weight_decay": 0.0},
        ),
        ParamGroupConfig(pattern=r".*", optimizer_name="Adam", optimizer_kwargs={"lr": 1e-2}),
    ]
    groups = groups[1:] if single else groups
    config = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
    return config.build(model_parts=parts)


class Loop:
    """What a Trainer has, and does."""

    def __init__(self, settings: Settings) -> None:
        self.settings, rank, world = settings, dist.get_rank(), dist.get_world_size()
        torch.manual_seed(3)
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
        self.parts = parts_of(settings.kind, mesh)
        if settings.single:
            self.parts = [nn.Sequential(*self.parts)]
        self.optimizers = optimizers_of(self.parts, single=settings.single)
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=settings.steps
        )
        self.state = Trained()
        self.loader = ParallelAwareDataloader(
            Numbers(rank), dp_rank=rank, dp_world_size=world, batch_size=4
        )
        manager = CheckpointManager if settings.theirs else HoldfastCheckpointManager
        self.manager = manager.Config(enable=True, **settings.config).build(
            dataloader=self.loader,
            model_parts=self.parts,
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.state},
            sd_adapter=None,
            base_folder="",
        )

    def train(self) -> None:
        found, state = self.manager.load(self.settings.config.get("load_step", -1)), self.state
        self.tell("BEGIN", state.step, found, *map(digest, self.parts))
        batches = iter(self.loader)
        while state.step < self.settings.steps:
            state.step += 1
            x = next(batches)
            for part in self.parts:
                x = part(x)
            loss = (x - 1).square().mean()
            loss.backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
            state.ntokens_seen += 8
            self.tell("L", state.step, loss.item().hex())
            self.manager.save(state.step, last_step=state.step == self.settings.steps)
        self.tell("END", state.step, state.ntokens_seen, *map(digest, self.parts))

    def tell(self, *values: Any) -> None:
        if dist.get_rank() == 0:
            print(*values, flush=True)


def main(text: str) -> None:
    warnings.filterwarnings("ignore", module="(?!holdfast)")
    warnings.simplefilter("always", HoldfastWarning)
    torch.set_num_threads(1)
    store = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **store)
    settings = Settings(**json.loads(text))
    loop = Loop(settings)
    if settings.seed:
        loop.manager.save(curr_step=0, last_step=True)
    else:
        loop.train()
    loop.manager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
