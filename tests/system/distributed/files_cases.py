"""Worker, 4 ranks: what FSDP1, FSDP2 and tensor parallelism write by torch.save, one file for each rank.

What torch itself gathers lies beside them.  The last cases restore from foreign files.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import holdfast
from capabilities import FSDP2_ON_CPUS
from holdfast.errors import FormatError, NotFound, NotRecoverable, UsageError

from .cases import run_all

warnings.filterwarnings("ignore", category=FutureWarning)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3), nn.LayerNorm(3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.full((4, 6), 1.0 + dist.get_rank())).square().sum().backward()
    optimizer.step()


def whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: whole(v) for k, v in value.items()}
    return value.full_tensor() if isinstance(value, DTensor) else value


def keep(root: Path, name: str, value: Any) -> None:
    root.mkdir(exist_ok=True, parents=True)
    torch.save(value, root / name)


# -- FSDP1 ----------------------------------------------------------------------------------------

KINDS = {
    "full": (StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()),
    "sharded": (
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(),
        ShardedOptimStateDictConfig(),
    ),
}


def fsdp1(root: Path) -> None:
    """With and without original parameters; ShardedTensors, and DTensors if there is a mesh."""
    mesh = init_device_mesh("cpu", (4,))
    for name, options in (
        ("flat", {}),
        ("orig", {"use_orig_params": True}),
        ("mesh", {"use_orig_params": True, "device_mesh": mesh}),
    ):
        model = FSDP(
            net(),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            device_id=torch.device("cpu"),
            **options,
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step(model, optimizer)
        for kind, (type_, config, optim_config) in KINDS.items():
            with FSDP.state_dict_type(model, type_, config, optim_config):
                saved = {
                    "model": model.state_dict(),
                    "optimizer": FSDP.optim_state_dict(model, optimizer),
                    "epoch": 3,
                    "loss": 0.5 + dist.get_rank(),
                    "rng": torch.get_rng_state() + dist.get_rank(),
                }
            keep(root / f"{name}-{kind}", f"rank{dist.get_rank()}.pt", saved)


def local_state_is_refused(root: Path) -> None:
    model = FSDP(net(), device_id=torch.device("cpu"))
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        keep(root, f"rank{dist.get_rank()}.pt", model.state_dict())
    dist.barrier()
    with pytest.raises(FormatError, match="LOCAL_STATE_DICT"):
        holdfast.open(root)


# -- FSDP2 ----------------------------------------------------------------------------------------


def fsdp2(root: Path) -> None:
    """Uneven shards, replicas, and shards of what tensor parallelism has cut before."""
    FSDP2_ON_CPUS.require()
    for name in ("shard", "hybrid", "tensor"):
        model = net()
        if name == "tensor":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            fully_shard(model, mesh=mesh["dp"])
        elif name == "hybrid":
            fully_shard(
                model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
            )
        else:
            fully_shard(model[0])
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        step(model, optimizer)
        rank = dist.get_rank()
        torch.serialization.set_crc32_options(name != "hybrid")
        keep(root / name, f"model_world_size_4_rank_{rank}.pt", model.state_dict())
        keep(root / name, f"optim_world_size_4_rank_{rank}.pt", optimizer.state_dict())
        keep(root / name, f"extra_state_world_size_4_rank_{rank}.pt", {"sched": {"last": 7}})
        torch.serialization.set_crc32_options(True)
        states = get_optimizer_state_dict(
            model, optimizer, options=StateDictOptions(full_state_dict=True)
        )
        expected = whole(model.state_dict())
        if rank == 0:
            keep(root / name, "expected.bin.txt", {"model": expected, "optim": states})


# -- restoring ------------------------------------------------------------------------------------


def sharded(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net(seed)
    FSDP2_ON_CPUS.require()
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=9.0)


def a_run_begins_with_a_source(root: Path) -> None:
    """On four ranks, sharded, from one file of a plain run; from then on its own steps count."""
    file, own = root / "start.pt", root / "own"
    torch.manual_seed(5)
    plain = net(5)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    step_alone(plain, optimizer)
    if dist.get_rank() == 0:
        saved = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "step": 41}
        torch.save(saved, file)
    dist.barrier()
    model, fresh = sharded(1)
    state = {"model": model, "optim": fresh}
    with holdfast.Checkpointer(own, state) as checkpointer:
        assert checkpointer.restore(source=f"torch:{file}") == 41
        assert fresh.param_groups[0]["lr"] == 0.01
        for p, q in zip(plain.parameters(), model.parameters()):
            assert torch.equal(p, whole(q))
            for name, value in optimizer.state[p].items():
                assert torch.equal(value, whole(fresh.state[q][name])), name
        step(model, fresh)
        checkpointer.save(42).wait()
    expected = [whole(p).detach().clone() for p in model.parameters()]
    model, fresh = sharded(2)
    with holdfast.Checkpointer(own, {"model": model, "optim": fresh}) as checkpointer:
        assert checkpointer.restore(source=f"torch:{file}") == 42
    assert all(torch.equal(p, whole(q)) for p, q in zip(expected, model.parameters()))
    model, fresh = sharded(3)
    with holdfast.Checkpointer(root / "kept", {"model": model, "optim": fresh}) as checkpointer:
        assert checkpointer.restore(source=f"torch:{file}", keep_source=True) == 41
    assert holdfast.steps(root / "kept") == [41]
    model, fresh = sharded(4)
    with holdfast.Checkpointer(root / "kept", {"model": model, "optim": fresh}) as checkpointer:
        assert checkpointer.restore(source=root / "is gone", keep_source=True) == 41
    assert all(torch.equal(p, whole(q)) for p, q in zip(plain.parameters(), model.parameters()))


def step_alone(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.full((4, 6), 2.0)).square().sum().backward()
    optimizer.step()


def a_root_may_hold_a_foreign_checkpoint(root: Path) -> None:
    """It is begun with; what the run saves lies beside it, and counts from then on."""
    source = net(5)
    if dist.get_rank() == 0:
        torch.save(source.state_dict(), root / "pytorch_model.bin")
    dist.barrier()
    model, _ = sharded(1)
    with holdfast.Checkpointer(root, {"model": model}) as checkpointer:
        assert checkpointer.restore() == 0
        assert all(
            torch.equal(p, whole(q)) for p, q in zip(source.parameters(), model.parameters())
        )
        with torch.no_grad():
            model[0].bias.zero_()
        checkpointer.save(3).wait()
    model, _ = sharded(2)
    with holdfast.Checkpointer(root, {"model": model}) as checkpointer:
        assert checkpointer.restore() == 3
    assert not whole(model[0].bias).any()
    assert holdfast.open(root).step == 3
    assert holdfast.open(f"torch:{root}").step == 0


def errors_of_a_source_reach_every_rank(root: Path) -> None:
    file = root / "start.pt"
    if dist.get_rank() == 0:
        torch.save(net(5).state_dict(), file)
        shutil.copy(file, root / "cut.pt")
        with open(root / "cut.pt", "r+b") as cut:
            cut.truncate(1000)
    dist.barrier()
    model, _ = sharded(1)
    before = [whole(p).detach().clone() for p in model.parameters()]
    with holdfast.Checkpointer(root / "own", {"model": model}) as checkpointer:
        with pytest.raises(NotFound, match="no dcp checkpoint"):
            checkpointer.restore(source=f"dcp:{root}")
        with pytest.raises(NotRecoverable, match="no checkpoint"):
            checkpointer.restore(source=root / "nothing")
        with pytest.raises(FormatError, match=r"not a whole zip"):
            checkpointer.restore(source=root / "cut.pt")
        with pytest.raises(NotFound, match="step 5"):
            checkpointer.restore(5, source=file)
        assert checkpointer.restore() == 0
    with pytest.raises(UsageError, match="saves in its own format"):
        holdfast.Checkpointer(f"torch:{root}", {"model": model})
    assert all(torch.equal(p, whole(q)) for p, q in zip(before, model.parameters()))


CASES = [
    fsdp1,
    local_state_is_refused,
    fsdp2,
    a_run_begins_with_a_source,
    a_root_may_hold_a_foreign_checkpoint,
    errors_of_a_source_reach_every_rank,
]

if __name__ == "__main__":
    run_all(CASES)
