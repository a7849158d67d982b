"""Worker, 4 ranks: meshes made by hand over some of the ranks, and ranks that hold other values."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import holdfast
from capabilities import FSDP2_ON_CPUS

from .cases import run_all
from .own_values_cases import Estimating, contents, train


def cut_over(mesh: DeviceMesh, value: torch.Tensor) -> DTensor:
    """A value that all ranks have, dim for dim cut over the axes of a mesh, without messages: those of some
    torch go astray in meshes whose ranks do not ascend."""
    part = value
    for dim, (size, place) in enumerate(zip(mesh.shape, mesh.get_coordinate() or ())):
        parts = part.chunk(size, dim)
        part = parts[place] if place < len(parts) else part.narrow(dim, 0, 0)
    cuts = [Shard(dim) for dim in range(mesh.ndim)]
    return DTensor.from_local(
        part.clone(), mesh, cuts, run_check=False, shape=value.shape, stride=value.stride()
    )


def goes_round(root: Path, meshes: dict[str, Any]) -> None:
    """Tensors cut over each mesh are saved, read and restored as they are."""
    made = {name: DeviceMesh("cpu", ranks) for name, ranks in meshes.items()}
    mine = {name: mesh for name, mesh in made.items() if mesh.get_coordinate() is not None}
    values = {name: torch.arange(1.0, 22.0).reshape(7, 3) + 100 * i for i, name in enumerate(made)}

    def state(values: dict[str, torch.Tensor]) -> dict[str, Any]:
        cut = {n: cut_over(mesh, values[n]) for n, mesh in mine.items()}
        return {"step": 1} | ({"tensors": cut} if cut else {})

    saved = state(values)
    holdfast.save(root, saved, step=1, deadline_s=120)
    with holdfast.open(root) as checkpoint:
        for name, value in values.items():
            assert checkpoint.read(f"tensors.{name}").tolist() == value.tolist(), name
    again = state({name: torch.zeros(7, 3) for name in values})
    holdfast.load(root, again, deadline_s=120)
    for name in mine:
        local, expected = again["tensors"][name].to_local(), saved["tensors"][name].to_local()
        assert torch.equal(local, expected), name


def part_numbers_need_not_follow_from_ranks(root: Path) -> None:
    """Rank 1 is the first of its mesh: rank 0 steers the others, say."""
    goes_round(root, {"a": [1, 2]})


def meshes_may_lie_in_any_way(root: Path) -> None:
    goes_round(
        root, {"a": [1, 2], "b": [0, 3], "c": [2, 1, 3], "d": [[1, 3], [0, 2]], "e": [0, 1, 2, 3]}
    )


def axes_need_not_form_a_mesh(root: Path) -> None:
    """Three ranks of four have one tensor, two have another."""
    goes_round(root, {"a": [0, 1, 2], "b": [0, 1], "c": [2, 3], "d": [0, 1, 2, 3]})


def optimizers_of_some_ranks_with_values_of_each(root: Path) -> None:
    """Two ranks have an optimizer with other values on each of them, and two have none such."""
    first = dist.get_rank() < 2
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]

    def built(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
        torch.manual_seed(seed)
        model: nn.Module = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
        FSDP2_ON_CPUS.require()
        fully_shard(model, mesh=meshes[0 if first else 1])
        optimizer: torch.optim.Optimizer
        if first:
            optimizer = Estimating(model.parameters(), lr=0.1, momentum=0.9)
            return model, optimizer, {"trainer": model, "optim": optimizer}
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, {"critic": model, "optim_b": optimizer}

    model, optimizer, state = built(0)
    train(model, optimizer, 2, seed=dist.get_rank())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        holdfast.save(root, state, step=1)
    with holdfast.open(root) as checkpoint:
        assert "optim" in checkpoint.manifest.per_rank
    *again, state = built(1)
    holdfast.load(root, state, deadline_s=20)
    assert contents(*again) == contents(model, optimizer)


CASES = [
    part_numbers_need_not_follow_from_ranks,
    meshes_may_lie_in_any_way,
    axes_need_not_form_a_mesh,
    optimizers_of_some_ranks_with_values_of_each,
]

if __name__ == "__main__":
    run_all(CASES)
