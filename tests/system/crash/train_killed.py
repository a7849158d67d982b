"""A small FSDP2 training that writes down what it holds after every step, under torchrun's agent.

    python train_killed.py ROOT LOGS TOTAL WORLD MAX_RESTARTS

The agent forks its workers from a process that has imported torch already: so a restart takes a
second, and not ten.  Each rank appends JSON lines to LOGS/r<rank>.jsonl: {"pid", "restored"} at a
start, {"step", "digest"} after a step.  The digest is of the rank's parameters, optimizer state and
random numbers.  Nobody goes past the step that LOGS/limit states.
"""

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import holdfast


def local_bytes(tensor: torch.Tensor) -> bytes:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().contiguous().numpy().tobytes()


def digest(model: nn.Module, optim: torch.optim.Optimizer) -> str:
    seen = xxhash.xxh3_64()
    for name, p in model.named_parameters():
        seen.update(name.encode() + local_bytes(p))
        for state, value in sorted(optim.state.get(p, {}).items()):
            seen.update(state.encode() + local_bytes(value))
    seen.update(torch.get_rng_state().numpy().tobytes())
    return seen.hexdigest()


def train(root: str, logs: Path, total: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    log = (logs / f"r{rank}.jsonl").open("a", buffering=1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 48))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1000 + rank)
    ckpt = holdfast.Checkpointer(
        root,
        {"model": model, "optim": optim},
        every=holdfast.Every(durable=2),
        keep=holdfast.Keep(last=3),
        deadline_s=300,
    )
    step = ckpt.restore()
    log.write(json.dumps({"pid": os.getpid(), "restored": step}) + "\n")
    while step < total:
        while step >= int((logs / "limit").read_text() or 0):
            time.sleep(0.01)
        loss = (model(torch.randn(8, 48)) - 1).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        step += 1
        log.write(json.dumps({"step": step, "digest": digest(model, optim)}) + "\n")
        ckpt.step(step)
    ckpt.close()
    dist.destroy_process_group()


def main() -> None:
    root, logs, *numbers = sys.argv[1:]
    total, world, max_restarts = map(int, numbers)
    multiprocessing.set_forkserver_preload(
        ["torch._dynamo", "holdfast.session.checkpointer", "train_killed"]
    )
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id="killed",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=max_restarts,
        monitor_interval=0.05,
        start_method="forkserver",
    )
    from train_killed import train as worker  # by its importable name, for the workers

    elastic_launch(config, worker)(root, Path(logs), total)


if __name__ == "__main__":
    main()
