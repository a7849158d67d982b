"""A loop with a DeepSpeed engine (ZeRO stage 2), as "Model Checkpointing" of its Getting Started.

The client state has the batch to which the loader is advanced.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import deepspeed.ops

# A kernel for inference: to compile it takes most of a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from small import ACCUMULATE, BATCH, EVERY, STEPS, Language, Texts, arguments
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from holdfast.integrations.deepspeed import attach


def engine_of(model: Language) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {
        "train_batch_size": BATCH * ACCUMULATE,
        "gradient_accumulation_steps": ACCUMULATE,
        "zero_optimization": {"stage": 2},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1000,
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=CosineAnnealingLR(optimizer, STEPS),
        config=config,
    )
    return engine


def main() -> None:
    args = arguments()
    deepspeed.init_distributed("gloo")
    engine = engine_of(Language())
    torch.manual_seed(dist.get_rank())  # for dropout
    sampler: Any = DistributedSampler(Texts())
    loader = DataLoader(Texts(), BATCH // dist.get_world_size(), sampler=sampler)
    ckpt = attach(engine, args.root) if args.by == "holdfast" else None
    _, client_state = engine.load_checkpoint(args.root)
    done = client_state["done"] if client_state else 0
    is_in_epoch = done % len(loader) > 0
    while engine.global_steps < STEPS:
        sampler.set_epoch(done // len(loader))
        batches = islice(loader, done % len(loader), None)
        if ckpt is not None and is_in_epoch:
            ckpt.restore_rng()  # once more: the loader's iterator has drawn
        is_in_epoch = False
        for texts in batches:
            engine.backward(engine(texts))
            engine.step()
            done += 1
            if done % (EVERY * ACCUMULATE) == 0:
                engine.save_checkpoint(args.root, client_state={"done": done})
    if ckpt is not None:
        ckpt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
