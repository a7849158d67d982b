"""An FSDP2 loop as in PyTorch's recipe "Getting Started with Distributed Checkpoint (DCP)".

The recipe's `AppState` has the model and the optimizer; here the scheduler and the step are beside them.
With holdfast the calls are the same, and `holdfast.dcp` has the writer and the reader.
"""

from __future__ import annotations

import os
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from small import ACCUMULATE, BATCH, EVERY, STEPS, Language, Texts, arguments
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import holdfast
from holdfast.dcp import Reader, Writer


class AppState:
    """What is saved. DCP calls `state_dict` and `load_state_dict`."""

    def __init__(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optimizer)
        sched = self.scheduler.state_dict()
        return {"model": model, "optim": optim, "sched": sched, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )
        self.scheduler.load_state_dict(state["sched"])
        self.step = state["step"]


class Saving:
    """Where checkpoints are: DCP's own folders, or a root of holdfast."""

    def __init__(self, root: str, by: str) -> None:
        self.root, self.is_own = root, by == "own"
        self.writer = None if self.is_own else Writer(root)

    def save(self, app: AppState) -> None:
        if self.is_own:
            dcp.save({"app": app}, checkpoint_id=os.path.join(self.root, f"step-{app.step}"))
        else:
            dcp.save({"app": app}, storage_writer=self.writer, checkpoint_id=str(app.step))

    def load(self, app: AppState) -> None:
        """Load the newest checkpoint, if there is one."""
        if self.is_own:
            folders = [name for name in os.listdir(self.root) if name.startswith("step-")]
            whole = [f for f in folders if os.path.exists(f"{self.root}/{f}/.metadata")]
            if whole:
                newest = max(whole, key=lambda name: int(name.removeprefix("step-")))
                dcp.load({"app": app}, checkpoint_id=os.path.join(self.root, newest))
        elif holdfast.steps(self.root):
            dcp.load({"app": app}, storage_reader=Reader(self.root))


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")
    model = Language()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    torch.manual_seed(dist.get_rank())  # for dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    app = AppState(model, optimizer, CosineAnnealingLR(optimizer, STEPS))
    sampler: Any = DistributedSampler(Texts())
    loader = DataLoader(Texts(), BATCH // dist.get_world_size(), sampler=sampler)
    saving = Saving(args.root, args.by)
    saving.load(app)
    batches = app.step * ACCUMULATE
    while app.step < STEPS:
        sampler.set_epoch(batches // len(loader))
        for texts in islice(loader, batches % len(loader), None):
            (model(texts) / ACCUMULATE).backward()
            batches += 1
            if batches % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()
                app.scheduler.step()
                app.step += 1
                if app.step % EVERY == 0:
                    saving.save(app)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
