"""Trainings of the claim `trainers`: one and the same net under each trainer.

Each `with_...(job)` imports its trainer and returns a function `train(name, at)`, which trains for `STEPS`
steps and saves `SAVES` times as contestant `name` does, under the folder `at`.  It returns two times in
seconds: of all steps, saves included; and from the last step until all was written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.lib.common import Job

STEPS, SAVES, BATCH = 40, 4, 16
EVERY = STEPS // SAVES
WIDTH, DEPTH = 1536, 4
Train = Callable[[str, Path], tuple[float, float]]


def width_of(job: Job) -> int:
    return WIDTH // (4 if job.args.small else 1)


def layers(job: Job) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(1)
    return nn.Sequential(*[nn.Linear(width_of(job), width_of(job)) for _ in range(DEPTH)])


def net_with_loss(job: Job) -> Any:
    """Return the net as the Trainer wants it: it returns its loss."""
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers(job)

        def forward(self, x: Any) -> dict[str, Any]:
            return {"loss": self.net(x).square().mean()}

    return Net()


def with_transformers(job: Job) -> Train:
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from holdfast.integrations.transformers import with_holdfast

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self.ended = time.perf_counter()

    data = [{"x": x} for x in torch.randn(STEPS * BATCH * job.size, width_of(job))]

    def train(name: str, at: Path) -> tuple[float, float]:
        args = TrainingArguments(
            output_dir=str(at),
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            save_strategy="no" if name == "none" else "steps",
            save_steps=EVERY,
            save_total_limit=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
        )
        clock = Clock()
        made = with_holdfast(Trainer) if name == "holdfast" else Trainer
        made(net_with_loss(job), args, train_dataset=data, callbacks=[clock]).train()
        return clock.ended - clock.began, time.perf_counter() - clock.ended

    return train


def with_accelerate(job: Job) -> Train:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from holdfast.integrations.accelerate import attach

    data = torch.randn(STEPS * BATCH * job.size, width_of(job))

    def train(name: str, at: Path) -> tuple[float, float]:
        config = ProjectConfiguration(str(at), automatic_checkpoint_naming=True, total_limit=1)
        accelerator = Accelerator(cpu=True, project_config=config)
        if name == "holdfast":
            accelerator = attach(accelerator)
        model = layers(job)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-4)
        loader = torch.utils.data.DataLoader(data, batch_size=BATCH)
        model, adam, loader = accelerator.prepare(model, adam, loader)
        began = time.perf_counter()
        for step, batch in enumerate(loader, 1):
            accelerator.backward(model(batch).square().mean())
            adam.step()
            adam.zero_grad()
            if name != "none" and step % EVERY == 0:
                accelerator.save_state()
        ended = time.perf_counter()
        if name == "holdfast":
            accelerator.holdfast.close()  # end_training() would end the process group, too
        done = time.perf_counter()
        accelerator.free_memory()
        return ended - began, done - ended

    return train


def with_lightning(job: Job) -> Train:
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

    def train(name: str, at: Path) -> tuple[float, float]:
        made: Any = DDPStrategy() if job.size > 1 else SingleDeviceStrategy("cpu")
        if name == "holdfast":
            made = strategy(made, at / "root")
        clock, saving = Clock(), []
        if name != "none":
            saving = [ModelCheckpoint(str(at / "paths"), every_n_train_steps=EVERY)]
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
        data = torch.utils.data.DataLoader(
            torch.randn(BATCH * STEPS, width_of(job)), batch_size=BATCH
        )
        trainer.fit(Net(), data)
        return clock.ended - clock.began, time.perf_counter() - clock.ended

    return train


def with_torchtitan(job: Job) -> Train:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    from holdfast.integrations.torchtitan import HoldfastCheckpointManager
    from integrations.trainers.titan import Trained

    os.environ.setdefault("TORCHELASTIC_RUN_ID", "bench")
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
        options = {"interval": EVERY, "async_mode": mode, "last_save_model_only": False}
        manager = manager_of.Config(enable=name != "none", folder=str(at), **options).build(
            dataloader=None,
            model_parts=[part],
            optimizers=optimizers,
            lr_schedulers=schedulers,
            states={"train_state": Trained()},
            sd_adapter=None,
        )
        batch = torch.randn(BATCH, width_of(job))
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


def with_deepspeed(job: Job, *, stage: int) -> Train:
    from deepspeed_on_cpu import deepspeed

    # isort: split

    import torch
    from deepspeed.utils import set_log_level_from_string

    from holdfast.integrations.deepspeed import attach

    set_log_level_from_string("error")
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }

    def train(name: str, at: Path) -> tuple[float, float]:
        model = layers(job)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-4)
        engine = deepspeed.initialize(model=model, optimizer=adam, config=config)[0]
        ckpt = attach(engine, at) if name == "holdfast" else None
        batch = torch.randn(BATCH, width_of(job)).bfloat16()
        began = time.perf_counter()
        for step in range(1, STEPS + 1):
            engine.backward(engine(batch).float().square().mean())
            engine.step()
            if name != "none" and step % EVERY == 0:
                engine.save_checkpoint(str(at), client_state={"step": step})
        ended = time.perf_counter()
        if ckpt is not None:
            ckpt.close()
        done = time.perf_counter()
        engine.destroy()
        return ended - began, done - ended

    return train
