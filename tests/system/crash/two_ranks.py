"""Saves by two real processes, forked from this one, of which rank 1 may die in mid-write.

    python -m system.crash.two_ranks KIND ROOT

For every moment of death: the step is saved whole (all 0), saved again by ranks of which one dies
(all 1), and read back.  Prints one JSON line per moment: {"moment", "values", "error"}.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import holdfast
import holdfast.live.roots
from capabilities import ALONE
from holdfast.store import LocalStore, Store
from holdfast.testing import Faulty
from ports import free_port

DIED = 9
MOMENTS = ["create", "write", "finish"]
ROWS = 3000
DEADLINES_S = (2.0, 10.0, 50.0)
"""Of a save of which one rank dies: the next, where the machine was too busy for it to come so far."""


class Dying(dcp.FileSystemWriter):
    """torch's writer, of a rank that dies when it is about to write its shards, and the other has written
    its own."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.others = Path(root) / "__0_0.distcp"
        self.before = self.others.stat()

    def write_data(self, *args, **kwargs):
        while not self.is_written():
            time.sleep(0.01)
        os._exit(DIED)

    def is_written(self) -> bool:
        now = self.others.stat()
        return (now.st_size, now.st_mtime_ns > self.before.st_mtime_ns) == (
            self.before.st_size,
            True,
        )


def dying(store: Store, moment: str) -> Store:
    """A store whose user is gone the moment that it is asked for `moment`."""

    def fail(op: str, key: str) -> None:
        if op == moment and key.startswith("steps/"):
            os._exit(DIED)

    return Faulty(store, fail)


def save(
    rank: int, kind: str, root: str, value: float, moment: str | None, deadline_s: float
) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    full = torch.full((ROWS, 64), value)
    sharded = distribute_tensor(full, mesh, [Shard(0)])
    if kind == "dcp":
        writer = Dying(root) if moment and rank == 1 else dcp.FileSystemWriter(root)
        dcp.save({"w": sharded}, storage_writer=writer)
        return
    if moment and rank == 1:
        holdfast.live.roots.open_store = lambda url: dying(LocalStore(url), moment)
    try:
        holdfast.save(root, {"d": {"w": sharded, "v": value}}, step=7, deadline_s=deadline_s)
    except holdfast.HoldfastError as error:
        print(json.dumps({"rank": rank, "error": f"{type(error).__name__}: {error}"}), flush=True)


def run(
    kind: str, root: str, value: float, moment: str | None = None, deadline_s: float = 400.0
) -> list[int]:
    """Fork the two ranks; their exit statuses."""
    port = free_port()
    sys.stdout.flush()
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            dist.init_process_group("gloo", rank=rank, world_size=2)
            try:
                save(rank, kind, root, value, moment, deadline_s)
                code = 0
            except BaseException:
                code = 3
            finally:
                os._exit(code)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def values(kind: str, root: str) -> list[float]:
    """Which values the step now has."""
    if kind == "dcp":
        out = {"w": torch.full((ROWS, 64), -1.0)}
        dcp.load(out, checkpoint_id=root, **ALONE)
        return out["w"].unique().tolist()
    with holdfast.open(root, step=7) as c:
        return sorted({float(v) for v in np.unique(c.read("d.w"))} | {c.extras["d"]["v"]})


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kind, root = sys.argv[1], sys.argv[2]
    for moment in MOMENTS if kind == "holdfast" else MOMENTS[:1]:
        for deadline_s in DEADLINES_S:
            shutil.rmtree(root, ignore_errors=True)
            Path(root).mkdir()
            first = run(kind, root, 0.0)
            second = run(kind, root, 1.0, moment, deadline_s)
            if second[1] == DIED:
                break
        found = values(kind, root)
        third = run(kind, root, 2.0)
        print(
            json.dumps(
                {
                    "moment": moment,
                    "exits": [first, second, third],
                    "values": found,
                    "after": values(kind, root),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
