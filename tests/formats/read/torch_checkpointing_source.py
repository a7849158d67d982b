"""Worker, 1 or 2 ranks: a training's state, saved by torch_checkpointing itself.  Arguments: folder, kind.

It gathers its metadata on CUDA, whatever the process group; here those tensors are on the CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from system.distributed.megatron_cpu import _Cuda


def whole(value: Any) -> Any:
    """A state dict with each tensor whole."""
    if isinstance(value, dict):
        return {k: whole(v) for k, v in value.items()}
    return value.full_tensor() if isinstance(value, DTensor) else value


def main(out: Path, kind: str) -> None:
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "tp":
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    else:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)  # some disks refuse
    if kind != "plain":
        spec = ItemSpec(resharder=DefaultResharder())
        config.items = {"model": spec, "optim": spec}
    else:  # without a resharder it does not say which part a rank holds
        weights, states = whole(weights), whole(states)
    state = {"model": weights, "optim": states, "epoch": 3, "note": {"a": [1, (2, 3)]}}
    with _Cuda():
        manager = CheckpointManager(config)
        manager.save(str(out / "saved"), state)
        manager.close()
    expected = whole(weights)
    moments = whole(states["state"])
    if dist.get_rank() == 0:
        torch.save({"model": expected, "moments": moments}, out / "expected.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
