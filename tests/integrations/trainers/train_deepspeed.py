"""A rank that trains by DeepSpeed, as `Run` says.

It writes each loss as soon as it is known, a line of its own, to a file of its process, and rank 0 the
digest of all masters and optimizer states at the end.  The two halves of a batch are losses of their own:
of two ranks each computes one, one rank both, in two micro-steps.
"""

from __future__ import annotations

from deepspeed_on_cpu import deepspeed

# isort: split

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import logger
from torch import nn
from torch.distributed import destroy_process_group, get_rank, get_world_size

import holdfast
from holdfast.integrations.deepspeed import attach
from system.distributed.engines import gathered

from .deepspeed_parts import BUILD, batches, own_weights
from .options import Run


def engine_of(run: Run) -> Any:
    if run.model:
        return BUILD[run.model]({"ep_size": 2, "stage": run.stage, "dtype": run.dtype}, 0)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 33), nn.Tanh(), nn.Dropout(run.dropout), nn.Linear(33, 31), nn.Linear(31, 4)
    )
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": run.stage, "stage3_param_persistence_threshold": 40},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if run.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if run.dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 3}
    if run.universal is not None:
        config["checkpoint"] = {"load_universal": True}
    sched = torch.optim.lr_scheduler.StepLR(adam, 5, gamma=0.9)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adam, lr_scheduler=sched, config=config
    )
    torch.manual_seed(100 + get_rank())
    return engine


def train(engine: Any, run: Run, losses: Any) -> None:
    rank, world = get_rank(), get_world_size()
    dtype = next(engine.module.parameters()).dtype
    while engine.global_steps < run.steps:
        step = engine.global_steps
        if run.model == "pipe":
            made = torch.Generator().manual_seed(step)
            loss = engine.train_batch(data_iter=batches(made, dtype))
            print(step + 1, rank, loss.item().hex(), file=losses, flush=True)
        halves = (rank,) if world == 2 else (0, 1)
        for half in () if run.model == "pipe" else halves:
            made = torch.Generator().manual_seed(2 * step + half)
            x = torch.randn(4, 16, generator=made).to(dtype)
            loss = engine(x).float().square().mean()
            engine.backward(loss)
            print(step + 1, half, loss.item().hex(), file=losses, flush=True)
            engine.step()
        time.sleep(run.pause_s)


def digest(engine: Any, run: Run) -> str:
    """Of every master and every optimizer state; of the weights of this rank, if it has a part of them."""
    found = hashlib.sha256()
    if run.model:
        for name, tensor in sorted(own_weights(engine, run.model).items()):
            found.update(name.encode() + tensor.float().numpy().tobytes())
        return found.hexdigest()
    for name, tensor in sorted(gathered(engine).items()):
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def main(options: dict[str, Any]) -> None:
    run = Run(**options)
    logger.setLevel("ERROR")
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    engine = engine_of(run)
    ckpt = None
    out = Path(run.out)
    if run.root is not None:
        memory = holdfast.Memory() if run.memory else None
        every = holdfast.Every(durable=4 if run.memory else 2, memory=1 if run.memory else None)
        ckpt = attach(
            engine,
            run.root,
            every=every,
            memory=memory,
            client_state=lambda: {"at": engine.global_steps},
        )
        path, client = engine.load_checkpoint(run.root)
        if path is not None:
            assert client == {"at": engine.global_steps}
            assert path == f"{run.root}/global_step{engine.global_steps}"
    if run.universal is not None:
        engine.load_checkpoint(run.universal)
        assert engine.global_steps > 0
    with open(out / f"losses-{os.getpid()}", "w") as losses:
        train(engine, run, losses)
    final = digest(engine, run)
    if ckpt is not None:
        ckpt.close()
    if get_rank() == 0:
        (out / "final.tmp").write_text(final)
        os.replace(out / "final.tmp", out / "final")
    destroy_process_group()
