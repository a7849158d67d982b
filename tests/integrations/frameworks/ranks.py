"""Ranks of the toy framework: `save ROOT FILE` trains, saves and goes on; `load ROOT FILE` restores.

FILE has the whole masters and states of the run that was saved, as they were at the save.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import holdfast
from holdfast.testing import Training
from integrations.frameworks.test_toy import run


def gathered(one: Training) -> dict[str, torch.Tensor]:
    """The whole master and its states, from all ranks, and the weights made of it."""
    optimizer = one.state["optim"]
    mine = {"master": optimizer.master.detach(), **optimizer.inner.state[optimizer.master]}
    pieces: list[dict[str, torch.Tensor]] = [mine] * dist.get_world_size()
    dist.all_gather_object(pieces, mine)
    whole = {n: torch.cat([p[n].reshape(-1) for p in pieces]) for n in mine if n != "step"}
    weights = [p.detach().reshape(-1) for p in one.state["model"].parameters()]
    return {**whole, "step": mine["step"].clone(), "weights": torch.cat(weights)}


def train(one: Training, steps: int) -> dict[str, torch.Tensor]:
    for _ in range(steps):
        one.train()
    return gathered(one)


def main(what: str, root: str, file: str) -> None:
    dist.init_process_group("gloo")
    other = run(seed=1)
    if what == "save":
        saved = run(seed=0)
        at_save = train(saved, 3)
        holdfast.save(root, saved.state, step=3)
        restored(other, root, at_save)
        same(train(other, 2), train(saved, 2))
        if dist.get_rank() == 0:
            torch.save(at_save, file)
    else:
        restored(other, root, torch.load(file))
    dist.destroy_process_group()


def restored(one: Training, root: str, expected: dict[str, torch.Tensor]) -> None:
    assert holdfast.load(root, one.state) == 3
    assert one.state["optim"].steps == 3
    same(gathered(one), expected)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


if __name__ == "__main__":
    main(*sys.argv[1:])
