"""Worker: a small training under FSDP2 that saves every step, and what befalls it.

    train.py ROOT STEPS [--plain] [--memory] [--late] [--fail KIND RANK STEP TIMES]

Each rank appends lines of JSON to ROOT.<name>: what it began with, and at the end rank 0 a digest of the
parameters.  KIND is `raise`, `exit`, `kill` or `stop`, done at that step while fewer than TIMES were done.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast

parser = argparse.ArgumentParser()
parser.add_argument("root")
parser.add_argument("steps", type=int)
parser.add_argument("--plain", action="store_true")
parser.add_argument("--memory", action="store_true")
parser.add_argument("--late", action="store_true", help="rank 1 fails once, when all are done")
parser.add_argument("--fail", nargs=4, metavar=("KIND", "RANK", "STEP", "TIMES"))
given = parser.parse_args()


def tell(**about: Any) -> None:
    line = json.dumps({"rank": dist.get_rank(), "pid": os.getpid(), **about}) + "\n"
    fd = os.open(f"{given.root}.told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, line.encode())
    os.close(fd)


def fail(step: int) -> None:
    """Do what `--fail` says, as often as it says."""
    if given.fail is None:
        return
    kind, rank, at, times = given.fail
    if dist.get_rank() != int(rank) or step != int(at):
        return
    done = Path(f"{given.root}.failed")
    count = len(done.read_text()) if done.exists() else 0
    if count >= int(times):
        return
    while given.plain and step - 2 not in holdfast.steps(given.root):
        time.sleep(0.01)  # saves are queued: on a busy machine this one may still be under way
    done.write_text("x" * (count + 1))
    if kind == "raise":
        raise ValueError(f"a fault at step {step}")
    if kind == "exit":
        raise SystemExit(3)
    os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        value = parameter.detach()
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found.update(whole.numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    dist.init_process_group("gloo")
    told = holdfast.kept("told", lambda: os.urandom(4).hex()) if not given.plain else ""
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: nn.Module = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
    if hasattr(torch.cpu.Stream, "record_event"):
        for layer in model.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:  # this torch has no FSDP2 on CPUs
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    every = holdfast.Every(durable=100, memory=1) if given.memory else holdfast.Every(durable=1)
    memory = holdfast.Memory() if given.memory else None
    state = {"model": model, "optim": optimizer}
    with holdfast.Checkpointer(
        given.root, state, every=every, memory=memory, when_busy="queue", deadline_s=60
    ) as ckpt:
        restored = ckpt.restore()
        step = int(restored)
        tell(begins=step, tier=restored.tier, kept=told, fds=len(os.listdir("/proc/self/fd")))
        while step < given.steps:
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            model(torch.randn(4, 16, generator=generator)).square().mean().backward()
            fail(step + 1)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            ckpt.step(step)
    found = digest(model)
    if dist.get_rank() == 0:
        tell(digest=found)
    dist.destroy_process_group()


if __name__ == "__main__":
    (main if given.plain else holdfast.recoverable(main))()
    late = Path(f"{given.root}.late")
    if given.late and os.environ["RANK"] == "1" and not late.exists():
        late.touch()
        os._exit(5)
