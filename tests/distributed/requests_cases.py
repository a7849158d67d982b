"""Worker: what each rank asks of a store in a run, in its restart, and with records; as JSON, by rank.

The store is a directory that looks like a bucket: none of what holdfast does differently on a disk.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.store import LocalStore, register
from holdfast.testing import Operation
from holdfast.testing.wrappers import Wrapper

T = TypeVar("T")
KEPT = 5


class Told(Wrapper):
    """Tells which requests were made."""

    made: list[tuple[str, str]] = []
    lock = threading.Lock()

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        with self.lock:
            self.made.append((operation.name, operation.key))
        return call()


class Run:
    """A sharded training, and a list of the requests of each of its phases."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.phases: dict[str, list[tuple[str, str]]] = {}
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def begin(self, name: str, **options: Any) -> holdfast.Checkpointer:
        state = {"model": self.model, "optim": self.optimizer}
        keep = holdfast.Keep(last=KEPT)
        return holdfast.Checkpointer(f"told://{self.out / name}", state, keep=keep, **options)

    def train(self, ckpt: holdfast.Checkpointer, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.model(torch.ones(4, 64)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            ckpt.step(step)

    def phase(self, name: str, call: Callable[[], T]) -> T:
        dist.barrier()
        Told.made.clear()
        result = call()
        dist.barrier()
        self.phases[name] = list(Told.made)
        return result


def save(ckpt: holdfast.Checkpointer, step: int) -> None:
    ckpt.save(step).wait(120)
    ckpt._tiers.durable.settle(120)


def without_records(run: Run) -> None:
    ckpt = run.phase("claim anew", lambda: run.begin("plain"))
    run.train(ckpt, 1, 1)
    for step in range(1, KEPT + 2):
        save(ckpt, step)
    run.phase("save", lambda: save(ckpt, KEPT + 2))
    run.phase("save in its place", lambda: save(ckpt, KEPT + 2))
    run.phase("close", ckpt.close)
    ckpt = run.phase("claim", lambda: run.begin("plain"))
    assert run.phase("restore", ckpt.restore) == KEPT + 2
    run.phase("first save", lambda: save(ckpt, KEPT + 3))
    ckpt.close()


def with_records(run: Run) -> None:
    options: dict[str, Any] = {
        "delta": holdfast.Delta(batch=2),
        "every": holdfast.Every(delta=1, durable=4),
    }
    ckpt = run.begin("records", **options)
    run.train(ckpt, 1, 8)
    ckpt._tiers.durable.settle(120)
    run.phase("save with records", lambda: save(ckpt, 8))
    run.train(ckpt, 9, 10)
    ckpt.close()
    ckpt = run.begin("records", **options)
    assert run.phase("restore with records", ckpt.restore) == 10
    ckpt.close()


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    register("told", lambda url: Told(LocalStore(url.partition("://")[2])))
    run = Run(out)
    without_records(run)
    with_records(run)
    (out / f"requests-{dist.get_rank()}.json").write_text(json.dumps(run.phases))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
