"""Worker: what each rank asks of a store in a run, in its restart, and with records; as JSON, by rank.

The store is a directory that looks like a bucket: none of what holdfast does differently on a disk.
`objects.requests_cases` has the same phases in a bucket, where a server counts.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from capabilities import FSDP2_ON_CPUS
from holdfast.core.checkpoint.names import manifest_key, read_manifest, step_prefix
from holdfast.core.format.manifest import encode_manifest
from holdfast.store import LocalStore, Store, open_store, register
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
    """A sharded training, and a list of the requests of each of its phases.

    `url`: of a root, by its name; `made`: where the requests of this rank arrive.
    """

    def __init__(self, url: Callable[[str], str], made: list[tuple[str, str]], kept: int) -> None:
        self.url = url
        self.made = made
        self.kept = kept
        self.phases: dict[str, list[tuple[str, str]]] = {}
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        FSDP2_ON_CPUS.require()
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def begin(self, name: str, **options: Any) -> holdfast.Checkpointer:
        state = {"model": self.model, "optim": self.optimizer}
        options = {"keep": holdfast.Keep(last=self.kept), **options}
        return holdfast.Checkpointer(self.url(name), state, **options)

    def train(self, ckpt: holdfast.Checkpointer, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.model(torch.ones(4, 64)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            ckpt.step(step)

    def phase(self, name: str, call: Callable[[], T]) -> T:
        dist.barrier()
        self.made.clear()
        dist.barrier()
        result = call()
        dist.barrier()
        self.phases[name] = list(self.made)
        return result

    def write(self, out: Path) -> None:
        (out / f"requests-{dist.get_rank()}.json").write_text(json.dumps(self.phases))


def save(ckpt: holdfast.Checkpointer, step: int) -> None:
    ckpt.save(step).wait(120)
    ckpt._tiers.durable.settle(120)


def fill(store: Store, of_step: int, steps: range) -> None:
    """Make steps that are copies of another one."""
    manifest = read_manifest(store, of_step)
    images = [(file.path, store.get(step_prefix(of_step) + file.path)) for file in manifest.files]
    for step in steps:
        for path, data in images:
            store.put(step_prefix(step) + path, data)
        store.put(manifest_key(step), encode_manifest(msgspec.structs.replace(manifest, step=step)))


def without_records(run: Run) -> None:
    """All kept steps but four are copies; those that go are the ranks' own."""
    kept = run.kept
    ckpt = run.phase("claim anew", lambda: run.begin("plain"))
    run.train(ckpt, 1, 1)
    for step in (1, 2, 3):
        save(ckpt, step)
    if dist.get_rank() == 0:
        fill(open_store(run.url("plain")), 3, range(4, kept + 1))
    dist.barrier()
    ckpt.close()
    ckpt = run.begin("plain")
    assert ckpt.restore() == kept
    save(ckpt, kept + 1)
    run.phase("save", lambda: save(ckpt, kept + 2))
    run.phase("save in its place", lambda: save(ckpt, kept + 2))
    run.phase("close", ckpt.close)
    ckpt = run.phase("claim", lambda: run.begin("plain"))
    assert run.phase("restore", ckpt.restore) == kept + 2
    run.phase("first save", lambda: save(ckpt, kept + 3))
    ckpt.close()


def with_records(run: Run) -> None:
    options: dict[str, Any] = {
        "delta": holdfast.Delta(batch=2),
        "every": holdfast.Every(delta=1, durable=4),
        "keep": holdfast.Keep(last=1),
    }
    ckpt = run.begin("records", **options)
    run.train(ckpt, 1, 8)
    settle(ckpt)
    run.phase("save in its place, with records", lambda: save(ckpt, 8))
    run.train(ckpt, 9, 10)
    settle(ckpt)
    run.phase("save with records", lambda: save(ckpt, 10))
    run.train(ckpt, 11, 13)
    ckpt.close()
    ckpt = run.phase("claim with records", lambda: run.begin("records", **options))
    assert run.phase("restore with records", ckpt.restore) == 13
    ckpt.close()


def settle(ckpt: holdfast.Checkpointer) -> None:
    """Wait for all that is under way to storage."""
    ckpt._tiers.durable.settle(120)
    ckpt._tiers.get("delta").flush()


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    register("told", lambda url: Told(LocalStore(url.partition("://")[2])))
    run = Run(lambda name: f"told://{out / name}", Told.made, KEPT)
    without_records(run)
    with_records(run)
    run.write(out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
