"""A small FSDP2 training that writes down what it holds: elastic_train.py ROOT LOGS.

Each rank appends JSON lines to LOGS/<host name>.jsonl: where it starts, with the state as restored, and
each step, with the state after it.  A state is told by the digest of all tensors, gathered whole by torch
itself, so it is the same on any number of ranks.  The first ranks write what it should be to
LOGS/reference.jsonl beforehand: the same training without holdfast and without failures.
Training ends at the step that the file LOGS/end states, once there is one.
"""

import hashlib
import json
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import holdfast

BATCH = 12
"""Rows of the global batch: shared evenly by 3 ranks and by 4."""
EVERY = 4
"""Steps between checkpoints."""
STEP_S = 0.1
"""How long a step takes at least."""
NUM_REFERENCE = 60
"""Steps of the reference."""


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 64, bias=False), nn.GELU(), nn.Linear(64, 48, bias=False))
    for part in (model[0], model[2], model):
        fully_shard(part)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def digest(model: nn.Module, optim: torch.optim.Optimizer) -> str:
    """Of all parameters and optimizer states, gathered whole; collective."""
    seen = hashlib.sha256()
    for name, parameter in model.named_parameters():
        for key, value in [("", parameter), *sorted(optim.state.get(parameter, {}).items())]:
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            seen.update(f"{name}.{key}".encode() + whole.detach().numpy().tobytes())
    return seen.hexdigest()


def train_step(model: nn.Module, optim: torch.optim.Optimizer, step: int) -> dict:
    """One step on this rank's rows of the global batch; what there is to write down about it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = torch.randn(BATCH, 48, generator=torch.Generator().manual_seed(step))
    loss = (model(rows.chunk(world)[rank]) - 1).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    mean = loss.detach() / world
    dist.all_reduce(mean)
    return {"step": step + 1, "loss": mean.item(), "digest": digest(model, optim)}


def write_reference(path: Path) -> None:
    model, optim = make()
    lines = [json.dumps(train_step(model, optim, step)) + "\n" for step in range(NUM_REFERENCE)]
    if dist.get_rank() == 0:
        path.with_suffix(".new").write_text("".join(lines))
        path.with_suffix(".new").replace(path)


def train(root: Path, logs: Path) -> None:
    log = (logs / f"{socket.gethostname()}.jsonl").open("a", buffering=1)
    model, optim = make()
    ckpt = holdfast.Checkpointer(
        root,
        {"model": model, "optim": optim},
        every=holdfast.Every(durable=EVERY),
        sigterm_s=20,
        deadline_s=30,
    )
    step = ckpt.restore()
    start = {"pid": os.getpid(), "world": dist.get_world_size(), "restored": step}
    log.write(json.dumps(start | {"digest": digest(model, optim)}) + "\n")
    end = logs / "end"
    while not end.exists() or step < int(end.read_text()):
        until = time.monotonic() + STEP_S
        log.write(json.dumps(train_step(model, optim, step)) + "\n")
        step += 1
        ckpt.step(step)
        time.sleep(max(0.0, until - time.monotonic()))
    ckpt.close()


def main() -> None:
    root, logs = map(Path, sys.argv[1:])
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    reference = logs / "reference.jsonl"
    known = reference.exists()
    dist.barrier()
    if not known:
        write_reference(reference)
    train(root, logs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
