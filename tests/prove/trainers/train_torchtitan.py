"""A loop as that of torchtitan's Trainer, with its optimizers, schedulers, loader and checkpoint manager.

The Trainer itself needs CUDA and Triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from small import ACCUMULATE, BATCH, EVERY, STEPS, Language, Texts, arguments
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from holdfast.integrations.torchtitan import HoldfastCheckpointManager


class Stream(IterableDataset[torch.Tensor]):
    """A rank's texts without an end, in an order of its own in each epoch; its position is its state."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.texts = list(Texts())[rank::num_ranks]  # type: ignore[call-overload]
        self.epoch = self.given = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            generator = torch.Generator().manual_seed(42 + self.epoch)
            order = torch.randperm(len(self.texts), generator=generator).tolist()
            for number in order[self.given :]:
                self.given += 1
                yield self.texts[number]
            self.given, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.given = state["epoch"], state["given"]


class TrainState:
    """What the Trainer saves of itself."""

    step = ntokens_seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


def sharded(model: Language, num_ranks: int) -> Language:
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("fsdp",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    parts: Any = [sharded(Language(), num_ranks)]
    torch.manual_seed(rank)  # for dropout
    config = default_adamw(lr=1e-3)
    config.implementation = "for-loop"
    optimizers = config.build(model_parts=parts)
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
        optimizers=optimizers, training_steps=STEPS
    )
    loader = ParallelAwareDataloader(
        Stream(rank, num_ranks),
        dp_rank=rank,
        dp_world_size=num_ranks,
        batch_size=BATCH // num_ranks,
        snapshot_every_n_steps=EVERY * ACCUMULATE,
    )
    trained = TrainState()
    manager = HoldfastCheckpointManager if args.by == "holdfast" else CheckpointManager
    checkpointer = manager.Config(enable=True, folder=args.root, interval=EVERY).build(
        dataloader=loader,
        model_parts=parts,
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": trained},
        sd_adapter=None,
        base_folder="",
    )
    checkpointer.load()
    batches = iter(loader)
    while trained.step < STEPS:
        trained.step += 1
        optimizers.zero_grad()
        for _ in range(ACCUMULATE):
            texts = next(batches)
            trained.ntokens_seen += texts.numel()
            (parts[0](texts) / ACCUMULATE).backward()
        torch.nn.utils.clip_grad_norm_(parts[0].parameters(), 1.0)
        checkpointer.maybe_wait_for_staging()
        optimizers.step()
        schedulers.step()
        checkpointer.save(trained.step, last_step=trained.step == STEPS)
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
