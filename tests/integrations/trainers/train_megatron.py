"""A rank that trains a GPT by Megatron-Core, saved by holdfast's strategies as `Run` says.

It writes each loss as soon as it is known, a line of its own, to a file of its process, and rank 0 the
digest of its weights at the end.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from holdfast.integrations.megatron import BACKEND, VERSION
from system.distributed.megatron_cpu import on_cpu
from system.distributed.megatron_gpt import Run as Training
from system.distributed.megatron_gpt import Setup

from .options import Run

LATEST = "latest_checkpointed_iteration.txt"


def state_of(training: Training, *, is_loading: bool = False) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    rng = ShardedObject("rng_state", torch.get_rng_state(), (world,), (rank,))
    return training.sharded_state(is_loading) | {"rng": rng, "iteration": training.iteration}


def save(training: Training, root: Path, calls: AsyncCallsQueue | None) -> None:
    """As Megatron-LM does: the file that names the newest one is written when it is complete."""
    number = training.iteration
    folder = root / f"iter_{number:07d}"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()

    def name_it() -> None:
        if dist.get_rank() == 0:
            (root / "new").write_text(str(number))
            os.replace(root / "new", root / LATEST)

    request = dist_checkpointing.save(
        state_of(training),
        str(folder),
        (BACKEND, VERSION),
        async_sharded_save=calls is not None,
        content_metadata=dict(training.setup.metadata),
    )
    if calls is None:
        dist.barrier()
        name_it()
    else:
        request.add_finalize_fn(name_it)
        calls.schedule_async_request(request)


def load(training: Training, root: Path) -> None:
    number = int((root / LATEST).read_text())
    if training.setup.distributed:
        training.train(1)  # without Transformer Engine it needs state before it can load
    folder = root / f"iter_{number:07d}"
    found = dist_checkpointing.load(state_of(training, is_loading=True), str(folder))
    training.gpt.load_state_dict(found["model"])
    training.optimizer.load_state_dict(found["optimizer"])
    torch.set_rng_state(found["rng"])
    training.iteration = found["iteration"]
    assert training.iteration == number


def train(training: Training, run: Run, losses: Any) -> None:
    root, calls = Path(run.root or ""), AsyncCallsQueue() if run.memory else None
    while training.iteration < run.steps:
        (loss,) = training.train(1)
        print(training.iteration, dist.get_rank(), loss.hex(), file=losses, flush=True)
        if calls is not None:
            calls.maybe_finalize_async_calls(blocking=False)
        if run.root is not None and training.iteration % 4 == 0:
            save(training, root, calls)
        time.sleep(run.pause_s)
    if calls is not None:
        calls.maybe_finalize_async_calls(blocking=True)


def main(options: dict[str, Any]) -> None:
    run = Run(**options)
    dist.init_process_group("gloo")
    on_cpu()
    training = Training(Setup(tp=run.tp, bf16=run.dtype == "bf16", distributed=run.stage == 1))
    if run.root is not None and (Path(run.root) / LATEST).exists():
        load(training, Path(run.root))
    with open(Path(run.out) / f"losses-{os.getpid()}", "w") as losses:
        train(training, run, losses)
    found = hashlib.sha256()
    for name, tensor in sorted(training.weights().items()):
        found.update(name.encode() + tensor.float().numpy().tobytes())
    if dist.get_rank() == 0:
        (Path(run.out) / "final.tmp").write_text(found.hexdigest())
        os.replace(Path(run.out) / "final.tmp", Path(run.out) / "final")
    dist.destroy_process_group()
