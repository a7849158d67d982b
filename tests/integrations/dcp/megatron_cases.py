"""Worker, 2 ranks: Megatron-Core's dist_checkpointing with the strategies of holdfast."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
from system.distributed.cases import run_all
from system.distributed.megatron_cpu import on_cpu

FULL = torch.arange(48.0).reshape(8, 6)


def state(fill: bool, ranks: int = 2) -> dict[str, Any]:
    """A weight that is cut by rows, one on every rank, an object of each rank, and what is common."""
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    rank = dist.get_rank() % ranks
    rows = FULL.chunk(ranks)[rank].clone() if fill else torch.zeros(8 // ranks, 6)
    bias = torch.full((5,), 3.0 if fill else 0.0, dtype=torch.bfloat16)
    seen = {"seed": (1, rank), "np": np.arange(3), "t": torch.ones(2)} if fill else None
    copy = dist.get_rank() // ranks
    return {
        "layer": {
            "w": ShardedTensor.from_rank_offsets(
                "layer.w", rows, (0, rank, ranks), replica_id=copy
            ),
            "b": ShardedTensor.from_rank_offsets("layer.b", bias, replica_id=dist.get_rank()),
        },
        "obj": ShardedObject("rng", seen, (ranks,), (rank,), replica_id=copy),
        "args": {"lr": 0.1},
    }


def saved(folder: Path, tree: Any = None, **options: Any) -> Any:
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True, parents=True)
    dist.barrier()
    tree = state(True) if tree is None else tree
    return dist_checkpointing.save(tree, str(folder), ("holdfast", 1), **options)


def check(folder: Path, ranks: int = 2) -> None:
    from megatron.core import dist_checkpointing

    wanted = state(False, ranks)
    if ranks == 1:
        del wanted["obj"]  # there were two, and one rank has one
    found = dist_checkpointing.load(wanted, str(folder))
    rank = dist.get_rank() % ranks
    assert torch.equal(found["layer"]["w"], FULL.chunk(ranks)[rank])
    assert found["layer"]["b"].tolist() == [3.0] * 5
    assert found["args"] == {"lr": 0.1}
    if ranks == 2:
        assert found["obj"]["seed"] == (1, rank)
        assert found["obj"]["np"].tolist() == [0, 1, 2]
        assert found["obj"]["t"].tolist() == [1, 1]
    names = dist_checkpointing.load_tensors_metadata(str(folder))
    assert {name: t.global_shape for name, t in names.items()} == {
        "layer.w": (8, 6),
        "layer.b": (5,),
    }


def at_the_call(out: Path) -> None:
    folder = out / "iter_0000100"
    saved(folder)
    assert holdfast.steps(folder) == [100]
    check(folder)
    check(folder, ranks=1)


def in_the_background(out: Path) -> None:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    calls = AsyncCallsQueue()
    calls.schedule_async_request(saved(out / "iter_0000007", async_sharded_save=True))
    calls.maybe_finalize_async_calls(blocking=True)
    assert holdfast.steps(out / "iter_0000007") == [7]
    check(out / "iter_0000007")


def a_process_that_dies_commits_nothing(out: Path) -> None:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    request = saved(out / "iter_0000008", async_sharded_save=True)
    if dist.get_rank() == 1:
        request = request._replace(async_fn=die)
    calls = AsyncCallsQueue()
    calls.schedule_async_request(request)
    with pytest.raises(CheckpointException, match="rank 1 ended without having done so"):
        calls.maybe_finalize_async_calls(blocking=True)
    assert not [*out.glob("iter_0000008/steps/*/manifest.json")]
    assert not (out / "iter_0000008" / "metadata.json").exists()


class Strange:
    """No plain data."""


def what_one_rank_cannot_save_is_told_on_both(out: Path) -> None:
    tree = state(True)
    if dist.get_rank() == 1:
        tree["obj"].data = Strange()
    with pytest.raises(CheckpointException, match="is no plain data"):
        saved(out / "iter_0000009", tree, async_sharded_save=True)


def die(*args: Any) -> None:
    os._exit(9)


CASES = [
    at_the_call,
    in_the_background,
    a_process_that_dies_commits_nothing,
    what_one_rank_cannot_save_is_told_on_both,
]

if __name__ == "__main__":
    on_cpu()
    import holdfast.integrations.megatron

    run_all(CASES)
