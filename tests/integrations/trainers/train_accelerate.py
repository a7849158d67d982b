"""A loop with an Accelerator, uninterrupted or over holdfast; its `main` is run by `launching`."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.state import PartialState
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedType,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    set_seed,
)

import holdfast
from holdfast.integrations.accelerate import attach
from integrations.trainers.tiny import Data, Journal, Net, Stream, die_at, digest

EPOCHS = 3
KEPT: list[Any] = []
"""Models, until the process is gone.  DDP holds the group that `end_training` destroys.  Where the group
went with the model, torch waited for gloo's thread, and that for Python's lock to let go of a tensor."""


class Mean:
    """A running mean, registered for checkpointing."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, saved: dict[str, float]) -> None:
        self.value = saved["value"]


class Position:
    """Number of batches that were trained on."""

    def __init__(self) -> None:
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        self.done = saved["done"]


class SizedStream(Stream):
    """A stream that has a length."""

    def __len__(self) -> int:
        return len(self.data)


class Ordered(torch.utils.data.Sampler[int]):
    """An order of its own for each epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def __len__(self) -> int:
        return self.size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        yield from torch.randperm(self.size, generator=generator).tolist()


def made(options: dict[str, Any]) -> Accelerator:
    kwargs: dict[str, Any] = {}
    if options.get("fsdp"):  # which accelerate offers on accelerators alone
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        kwargs["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
        )
    steps = options.get("accumulate", 2)
    if "zero" in options:
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
        kwargs["deepspeed_plugin"] = DeepSpeedPlugin(
            hf_ds_config=zero_config(options["zero"], steps)
        )
    return Accelerator(
        cpu="zero" not in options,
        gradient_accumulation_steps=steps,
        dataloader_config=DataLoaderConfiguration(**options.get("loader", {})),
        project_config=ProjectConfiguration(
            options["folder"],
            automatic_checkpoint_naming=options.get("automatic", False),
            total_limit=2,
        ),
        **kwargs,
    )


def zero_config(stage: int, steps: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": steps,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 40},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


def peek(loader: Any, journal: Journal) -> None:
    """Begin a pass over a loader, and leave it at its second batch."""
    for number, batch in enumerate(loader):
        journal.add(judged=batch["labels"].tolist())
        if number == 1:
            break


def main(options: dict[str, Any]) -> None:
    journal = Journal(options["journal"])
    seed = options.get("again", 3) if journal.read() else 3  # of a script that seeds nothing
    set_seed(seed)
    accelerator = made(options)
    model = Net(options.get("drop", 0.2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, options.get("period", 5))
    data: Any = Data(options.get("size", 50), noisy=options.get("noisy", False))
    loader = torch.utils.data.DataLoader(
        SizedStream(data) if options.get("streams") else data,
        batch_size=options.get("batch", 4),
        shuffle=None if options.get("streams") or options.get("ordered") else True,
        sampler=Ordered(len(data)) if options.get("ordered") else None,
        num_workers=options.get("workers", 0),
        persistent_workers=options.get("persistent", False),
        generator=torch.Generator().manual_seed(2 + seed) if options.get("generator") else None,
    )
    uses = options.get("use", "save_state")
    if uses != "own":
        extra = {k: eval(v, {"holdfast": holdfast}) for k, v in options.get("holdfast", {}).items()}
        accelerator = attach(accelerator, **extra)
    judging = torch.utils.data.DataLoader(
        loader.dataset if options.get("same") else Data(64, noisy=True), batch_size=4, shuffle=True
    )
    if options.get("apart"):
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        accelerator.prepare(scheduler)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    judging = accelerator.prepare(judging)
    mean, position = Mean(), Position()
    accelerator.register_for_checkpointing(mean)
    accelerator.register_for_checkpointing(position)
    journal.writes = accelerator.is_main_process
    if uses != "own":
        restored = accelerator.load_state()
        journal.add(restored=int(restored), tier=restored.tier)
    die, moment, by = options.get("die", 0), 0, options.get("by", signal.SIGKILL)
    if accelerator.process_index not in options.get("dying", range(accelerator.num_processes)):
        die = 0
    stateful = options.get("loader", {}).get("use_stateful_dataloader", False)
    per_pass = options.get("leave", len(loader))
    first = position.done // per_pass
    if options.get("skips_all") and position.done:  # at the end of an epoch, one without a batch
        first = (position.done - 1) // per_pass
    for epoch in range(first, EPOCHS):
        skipped = 0 if stateful else position.done - epoch * per_pass
        batches = skip_first_batches(loader, skipped) if skipped else loader
        others: Any = itertools.repeat({"x": torch.zeros(())})
        if options.get("beside"):
            others = skip_first_batches(judging, skipped) if skipped else judging
        for batch, other in zip(batches, others):
            with accelerator.accumulate(model):
                noise = torch.randn(()) if options.get("noise", True) else torch.tensor(0.0)
                loss = model(**batch)["loss"] * (1 + 0.01 * noise)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            position.done += 1
            value = accelerator.reduce(loss.detach(), "mean").item()
            mean.value = 0.9 * mean.value + value
            beside = other["x"].sum().item()
            journal.add(step=position.done, loss=value, mean=mean.value, beside=beside)
            if position.done == options.get("peek"):
                peek(judging, journal)
            moment += 1
            die_at(die, moment, by)
            if uses == "step" and accelerator.sync_gradients:
                accelerator.holdfast.step(position.done)
            elif uses == "save_state" and accelerator.sync_gradients:
                accelerator.save_state(f"step_{position.done}")
                if options.get("waits"):
                    accelerator.holdfast.wait()
            moment += 1
            die_at(die, moment, by)
            if "leave" in options and position.done % per_pass == 0:
                break
    whole = digest(model)
    KEPT.append(model)
    accelerator.end_training()
    journal.add(end=whole, mean=mean.value)
