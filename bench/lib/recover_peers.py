"""What others have for a lost rank, as far as it runs on CPUs with gloo: ranks of the claim `recover`.

nvrx      NVIDIA's nvidia-resiliency-ext, in-process restart: survivors enter the function again, and a
          reserve rank, started with the others, takes the lost place.  It keeps no state: each rank writes
          its own part of every step to memory, and reads it back
torchft   a replica group per rank, with the whole model; the others go on without the lost one, which its
          launcher starts again, and which is given the state by one of them
lm        lm-resiliency under torchrun: all ranks start again; each step is flushed to files in memory.
          Its rendezvous of standby nodes is left out: 0.2.0 does not register with PyTorch 2.13
          ("create_rendezvous_handler() missing 1 required positional argument: 'params'")

Their settings are those of their own examples for CPUs.
"""

import argparse
import datetime
import os
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist

from bench.lib.recover_train import Training, trained
from bench.lib.stamps import Stamps

RANKS = 4


class Parts:
    """This rank's part of the newest two steps, in files in memory."""

    def __init__(self, folder: Path, training: Training) -> None:
        self.folder, self.training = folder, training
        self.name = f"rank{dist.get_rank()}"
        folder.mkdir(exist_ok=True)

    def path(self, step: int) -> Path:
        return self.folder / f"{self.name}-{step}"

    def after(self, step: int) -> None:
        state = self.training.optim.state
        moments = [
            [t.to_local() if hasattr(t, "to_local") else t for t in state[p].values()]
            for p in self.training.model.parameters()
        ]
        under_way = self.folder / f"{self.name}.new"
        torch.save((dict(self.training.locals()), moments), under_way)
        under_way.rename(self.path(step))
        self.path(step - 2).unlink(missing_ok=True)

    def restore(self) -> int:
        steps = [int(p.name.split("-")[1]) for p in self.folder.glob(f"{self.name}-*")]
        newest = torch.tensor(max(steps, default=0))
        dist.all_reduce(newest, dist.ReduceOp.MIN)
        step = int(newest)
        if step:
            self._load(*torch.load(self.path(step)))
        return step

    def _load(self, weights: dict[str, torch.Tensor], moments: list[list[torch.Tensor]]) -> None:
        with torch.no_grad():
            for name, local in self.training.locals():
                local.copy_(weights[name])
            for p, (count, *two) in zip(self.training.model.parameters(), moments):
                found = {"step": count}
                for key, values in zip(("exp_avg", "exp_avg_sq"), two):
                    found[key] = torch.zeros_like(p)
                    found[key].to_local().copy_(values)
                self.training.optim.state[p] = found


def nvrx(given: argparse.Namespace, stamps: Stamps) -> None:
    """As in its `advanced_example.py`: one store for all iterations, gloo's timeout 10 s."""
    from nvidia_resiliency_ext import inprocess

    port, rank = int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], port + 2, int(os.environ["WORLD_SIZE"]), rank == 0,
        multi_tenant=True, wait_for_workers=True,
    )  # fmt: skip

    @inprocess.Wrapper(
        store_kwargs={"port": port + 1},
        rank_assignment=inprocess.Compose(
            inprocess.rank_assignment.MaxActiveWorldSize(RANKS),
            inprocess.rank_assignment.ShiftRanks(),
        ),
    )
    def train(call: Optional[inprocess.CallWrapper] = None) -> None:  # noqa: UP045  read by it
        stamps.begin(attempt=call.iteration)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(str(call.iteration), store),
            rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]),
            timeout=datetime.timedelta(seconds=10),
        )  # fmt: skip
        stamps("group")
        training = Training(given)
        stamps("model")
        parts = Parts(Path(os.environ["RECOVER_MEMORY"]) / "parts", training)
        training.number = parts.restore()
        stamps("restored", step=training.number)
        trained(given, stamps, training, parts.after)

    stamps.ready()
    train()


def torchft(given: argparse.Namespace, stamps: Stamps) -> None:
    """As in its `train_ddp.py`."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
    from torchft.checkpointing.pg_transport import PGTransport

    stamps.ready()
    replica = int(os.environ["REPLICA_GROUP_ID"])
    stamps.begin(rank=replica, world=RANKS, attempt=0)
    training = Training(given, is_whole=True)
    stamps("model")
    group = ProcessGroupGloo(timeout=datetime.timedelta(seconds=5))
    manager = Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=lambda state: _load(training, state),
        state_dict=lambda: {
            "model": training.model.state_dict(),
            "optim": training.optim.state_dict(),
        },
        replica_id=f"recover_{replica}",
        timeout=datetime.timedelta(seconds=30),
        checkpoint_transport=PGTransport(
            group, timeout=datetime.timedelta(seconds=10), device=torch.device("cpu")
        ),
    )
    stamps("group")
    wrapped = DistributedDataParallel(manager, training.model)
    optim = Optimizer(manager, training.optim)
    end = given.root / "end"
    while not (end.exists() and manager.current_step() >= int(end.read_text())):
        before = training.number = manager.current_step()
        optim.zero_grad()
        generator = torch.Generator().manual_seed(1000 * before + replica)
        wrapped(torch.randn(8, 512, generator=generator)).square().mean().backward()
        optim.step()
        if manager.current_step() > before:
            stamps(
                "step", step=manager.current_step(), attempt=manager._quorum_id,
                world=manager.num_participants(),
            )  # fmt: skip
    manager.shutdown(wait=False)


def _load(training: Training, state: dict[str, Any]) -> None:
    training.model.load_state_dict(state["model"])
    training.optim.load_state_dict(state["optim"])


def lm(given: argparse.Namespace, stamps: Stamps) -> None:
    """As in its `quickstart.py`, but that every step is captured, and flushed to memory."""
    from lm_resiliency import InMemoryCkptConfig, enable_resiliency

    stamps.ready()
    stamps.begin()
    dist.init_process_group("gloo")
    stamps("group")
    training = Training(given)
    stamps("model")
    handle = enable_resiliency(
        training.model,
        training.optim,
        interval=1,
        enable_detection=False,
        checkpoint=InMemoryCkptConfig(
            replication_jump=RANKS // 2,
            disk_flush_interval=1,
            disk_folder=str(Path(os.environ["RECOVER_MEMORY"]) / "lm"),
            run_id="recover",
            pin_memory=False,
            verify_integrity=True,
        ),
        device=torch.device("cpu"),
    )
    training.number = handle.step_count
    stamps("restored", step=training.number)
    trained(given, stamps, training, lambda _: None)
    handle.close()
    dist.destroy_process_group()
