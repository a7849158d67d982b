"""A training whose every step is known, whatever the number of ranks: recover_train.py ROOT LOGS [OPTIONS].

Parameters are whole numbers in float64, sharded over the ranks, and so are the sums of the global batch:
nothing is rounded, and no order of adding matters.  Each rank appends JSON lines to LOGS/HOST.SLOT.jsonl:
how it begins, and every step with the digest of the whole state.  Training ends at the step that the file
LOGS/end states, once there is one.  OPTIONS is JSON: fields of `Options`.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

import holdfast

WIDTH, ROWS = 720, 24
STEP_S = 0.05


@dataclass
class Options:
    memory: bool = True
    every: int = 1
    durable: int = 1000
    is_plain: bool = False
    """Not marked as recoverable."""
    fails_at: str = ""
    """`SLOT:STEP`: that rank of node0 raises whenever it comes to that step, or at once if it is 0."""


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(-8, 9, (ROWS, WIDTH), generator=generator).double()


def advance(state: dict[str, torch.Tensor], total: torch.Tensor) -> None:
    """The parameters and a momentum, given the sum of the batch; each shard for itself."""
    state["momentum"].mul_(3).add_(total).remainder_(1009)
    state["weights"].add_(total).add_(state["momentum"])


def digest(state: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(state[k].numpy().tobytes() for k in sorted(state))).hexdigest()


def expected() -> Iterator[str]:
    """The digest after each step, from the first on."""
    state = {name: torch.zeros(WIDTH, dtype=torch.float64) for name in ("weights", "momentum")}
    step = 0
    while True:
        advance(state, batch(step).sum(0))
        yield digest(state)
        step += 1


def tell(**about: object) -> None:
    path = Path(sys.argv[2]) / f"{socket.gethostname()}.{os.environ['LOCAL_RANK']}.jsonl"
    line = json.dumps({"time": time.time(), "pid": os.getpid(), **about}) + "\n"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, line.encode())
    os.close(fd)


def committed(event: holdfast.events.Event) -> None:
    if event.name in ("snapshot.committed", "save.committed"):
        tell(committed=event.fields["step"])


def main() -> None:
    root, logs = map(Path, sys.argv[1:3])
    options = Options(**json.loads(sys.argv[3])) if len(sys.argv) > 3 else Options()
    holdfast.kept("events", lambda: holdfast.events.subscribe(committed))
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    zeros = torch.zeros(WIDTH, dtype=torch.float64)
    state = {name: distribute_tensor(zeros, mesh, [Shard(0)]) for name in ("weights", "momentum")}
    often = {"memory": options.every} if options.memory else {}
    every = holdfast.Every(durable=options.durable, **often)
    memory = holdfast.Memory() if options.memory else None
    with holdfast.Checkpointer(root, state, every=every, memory=memory, deadline_s=30) as ckpt:
        restored = ckpt.restore()
        step = int(restored)
        host = socket.gethostname()
        tell(host=host, rank=rank, size=size, begins=step, tier=restored.tier, digest=whole(state))
        while not (logs / "end").exists() or step < int((logs / "end").read_text()):
            fail(options, step)
            until = time.monotonic() + STEP_S
            total = batch(step)[rank::size].sum(0)
            dist.all_reduce(total)
            sharded = distribute_tensor(total, mesh, [Shard(0)], src_data_rank=None)
            advance(locals_of(state), sharded.to_local())
            step += 1
            tell(step=step, digest=whole(state))
            ckpt.step(step)
            time.sleep(max(0.0, until - time.monotonic()))
    tell(closed=step)
    dist.destroy_process_group()


def fail(options: Options, step: int) -> None:
    if options.fails_at and socket.gethostname() == "node0":
        slot, _, at = options.fails_at.partition(":")
        if os.environ["LOCAL_RANK"] == slot and at in ("0", str(step + 1)):
            raise ValueError("a fault")


def locals_of(state: dict[str, DTensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to_local() for name, tensor in state.items()}


def whole(state: dict[str, DTensor]) -> str:
    return digest({name: tensor.full_tensor() for name, tensor in state.items()})


if __name__ == "__main__":
    warnings.simplefilter("ignore", holdfast.HoldfastWarning)
    is_plain = len(sys.argv) > 3 and json.loads(sys.argv[3]).get("is_plain", False)
    (main if is_plain else holdfast.recoverable(main))()
