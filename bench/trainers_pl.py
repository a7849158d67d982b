"""Lightning's Trainer and torchtitan's checkpoint manager: with holdfast against their own saving.

The same training, once without saving, once with the trainer's own checkpoints and once with holdfast's,
as often.  *Per step* is the time of all steps, saves included, by their number; *stall* is what a save
adds: the time of the steps less that without saving, by the number of saves.  What is written after the
last step is not counted for anybody that saves in the background; it is told apart (`rest_s`).
lightning    DDP (one device with 1 rank), ModelCheckpoint(every_n_train_steps=N, save_top_k=1)
torchtitan   FSDP2, its real parts in a loop as its Trainer's; its manager synchronous, and `async`
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from common import HERE, Job, main, over_ranks, row, settle, take_turns

sys.path.insert(0, str(HERE.parent / "tests"))
STEPS, SAVES = 40, 4
WIDTH, DEPTH = 1536, 4


def layers(job: Job) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(1)
    width = WIDTH // (4 if job.args.small else 1)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(DEPTH)])


Timed = Callable[[str, Path], tuple[float, float]]


def with_lightning(job: Job) -> Timed:
    """Return a function that trains, and returns the seconds of all steps, and until all was written."""
    import lightning
    import torch
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

    from holdfast.integrations.lightning import strategy

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers(job)

        def training_step(self, batch: Any, number: int) -> Any:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Clock(Callback):
        def on_train_start(self, *_: Any) -> None:
            self.began = time.perf_counter()

        def on_train_end(self, *_: Any) -> None:
            self.ended = time.perf_counter()

    width = layers(job)[0].in_features

    def train(name: str, at: Path) -> tuple[float, float]:
        made: Any = DDPStrategy() if job.size > 1 else SingleDeviceStrategy("cpu")
        if name == "holdfast":
            made = strategy(made, at / "root")
        clock, saving = Clock(), []
        if name != "none":
            saving = [ModelCheckpoint(str(at / "paths"), every_n_train_steps=STEPS // SAVES)]
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=job.size,
            strategy=made,
            max_steps=STEPS,
            logger=False,
            enable_checkpointing=bool(saving),
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            callbacks=[clock, *saving],
        )
        data = torch.utils.data.DataLoader(torch.randn(16 * STEPS, width), batch_size=16)
        trainer.fit(Net(), data)
        return clock.ended - clock.began, time.perf_counter() - clock.ended

    return train


def with_torchtitan(job: Job) -> Timed:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    from holdfast.integrations.torchtitan import HoldfastCheckpointManager
    from trainers.titan import Trained

    mesh = init_device_mesh("cpu", (job.size,), mesh_dim_names=("fsdp",))

    def train(name: str, at: Path) -> tuple[float, float]:
        part = layers(job)
        fully_shard(part, mesh=mesh)
        config = default_adamw(lr=1e-4)
        config.implementation = "for-loop"
        optimizers = config.build(model_parts=[part])
        schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=optimizers, training_steps=STEPS
        )
        manager_of: Any = HoldfastCheckpointManager if name == "holdfast" else CheckpointManager
        mode = {"own": "disabled"}.get(name, "async")
        options = {"interval": STEPS // SAVES, "async_mode": mode, "last_save_model_only": False}
        manager = manager_of.Config(enable=name != "none", folder=str(at), **options).build(
            dataloader=None,
            model_parts=[part],
            optimizers=optimizers,
            lr_schedulers=schedulers,
            states={"train_state": Trained()},
            sd_adapter=None,
        )
        batch = torch.randn(16, part[0].in_features)
        began = time.perf_counter()
        for step in range(1, STEPS + 1):
            part(batch).square().mean().backward()
            manager.maybe_wait_for_staging()
            optimizers.step()
            schedulers.step()
            optimizers.zero_grad()
            manager.save(step)
        ended = time.perf_counter()
        manager.maybe_wait_for_saving()
        manager.close()
        return ended - began, time.perf_counter() - ended

    return train


TRAINERS: dict[str, tuple[Callable[[Job], Timed], tuple[str, ...]]] = {
    "lightning": (with_lightning, ("none", "own", "holdfast")),
    "torchtitan": (with_torchtitan, ("none", "own", "own async", "holdfast")),
}


def work(job: Job) -> dict[str, Any]:
    logging.disable(logging.CRITICAL)
    os.environ.setdefault("TORCHELASTIC_RUN_ID", "bench")
    make, names = TRAINERS[job.phase]
    train = make(job)
    rest: dict[str, list[float]] = {name: [] for name in names}

    def one(name: str, _: int) -> float:
        at = job.root / "run"
        settle(job, at)
        took, after = (over_ranks(seconds) for seconds in train(name, at))
        rest[name].append(after)
        if job.rank == 0:
            shutil.rmtree(at, ignore_errors=True)
        return took

    for name in names:
        one(name, 0)  # the first one imports and allocates
    samples = take_turns({name: partial(one, name) for name in names}, job.args.rounds)
    num = sum(p.numel() * 4 * 3 for p in layers(job).parameters())
    return {"bytes": num, "samples": samples, "rest_s": rest, "steps": STEPS, "saves": SAVES}


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    for run, f in found.items():
        s = f["samples"]
        ranks, trainer = run[0], run[1:]
        stall = {
            name: median((a - b) / SAVES for a, b in zip(s[name], s["none"]))
            for name in s
            if name != "none"
        }
        for other in [name for name in stall if name != "holdfast"]:
            what = f"{trainer}, {ranks} rank{'s' * (ranks != '1')}, against {other}"
            ours, theirs = (f"{median(s[n]) / STEPS * 1e3:.1f} ms" for n in ("holdfast", other))
            faster = median(a / b for a, b in zip(s[other], s["holdfast"]))
            out.append(row(f"{what}: per step", ours, theirs, faster))
            ours, theirs = (f"{stall[n] * 1e3:.0f} ms" for n in ("holdfast", other))
            share = stall["holdfast"] / stall[other] if stall[other] > 0 else float("nan")
            out.append(row(f"{what}: stall of a save", ours, theirs, share))
    return out


if __name__ == "__main__":
    main(
        "trainers_pl",
        __doc__,
        work,
        rows,
        rounds=4,
        ranks="1,2",
        phases=lambda numbers: [(n, trainer) for trainer in TRAINERS for n in numbers],
    )
