"""Worker, 2 ranks: what one rank alone has done since a restore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

import holdfast
from holdfast.errors import UsageError

from .cases import run_all


def parts() -> tuple[nn.Linear, dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return model, {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)}


def train(state: dict[str, Any]) -> None:
    state["model"](torch.ones(2, 4)).sum().backward()
    state["optim"].step()
    state["optim"].zero_grad()


def begun(out: Path, **more: Any) -> None:
    _, state = parts()
    with holdfast.Checkpointer(out, {**state, **more}) as ckpt:
        train(state)
        ckpt.save(1).wait(60)


def late_values_of_one_rank_alone(out: Path) -> None:
    """None on the other one, or no such key."""
    begun(out, run={"id": 1})
    for step, value in ((2, {0: {"id": 2}, 1: None}), (3, {0: {"id": 3}})):
        _, state = parts()
        with holdfast.Checkpointer(out, state, deadline_s=60, on_error="raise") as ckpt:
            ckpt.restore(step=1)
            if dist.get_rank() in value:
                ckpt.state["run"] = value[dist.get_rank()]
            ckpt.save(step).wait(60)
            ckpt.save(step + 10).wait(60)


def late_objects_of_one_rank_alone(out: Path) -> None:
    """Refused on both, at once; so is a value where the other rank has an object, and an optimizer."""
    model, _ = parts()
    begun(out, average=AveragedModel(model))
    for late in (
        {0: AveragedModel(model)},
        {1: AveragedModel(model)},
        {0: AveragedModel(model), 1: None},
        {0: {"id": 1}, 1: AveragedModel(model)},
        {0: AveragedModel(model), 1: torch.optim.SGD(model.parameters(), lr=0.1)},
    ):
        model, state = parts()
        with holdfast.Checkpointer(out, state, deadline_s=60, on_error="raise") as ckpt:
            assert ckpt.restore() == 1
            if dist.get_rank() in late:
                ckpt.state["average"] = late[dist.get_rank()]
            with pytest.raises(
                UsageError, match=r"'average', .* came .* on rank 0, and as .* on rank 1"
            ):
                ckpt.save(2)


def the_restored_step_once_more(out: Path) -> None:
    """Weights of one rank are written, as DDP does; then one rank alone trains."""
    begun(out)
    model, state = parts()
    with holdfast.Checkpointer(out, state, deadline_s=60, on_error="raise") as ckpt:
        assert ckpt.restore() == 1
        if dist.get_rank() == 0:
            with torch.no_grad():
                model.weight.mul_(1)
        ckpt.save(1).wait(60)
        if dist.get_rank() == 1:
            train(state)
        with pytest.raises(UsageError, match="has been trained on since"):
            ckpt.save(1)


CASES = [
    late_values_of_one_rank_alone,
    late_objects_of_one_rank_alone,
    the_restored_step_once_more,
]

if __name__ == "__main__":
    run_all(CASES)
