"""What ranks do together in `test_objects`: each function is run by every rank of a life."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import holdfast
from tiers.memory.life import make

ENDS = 6
"""The step after which all ranks die."""
BEGINS = 3
"""The step after which the average is one, so that its state has tensors."""


class Average:
    """Of sharded weights, sharded as they are; an object of the script's own."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.of: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def update(self, step: int) -> None:
        for name, p in self.model.named_parameters():
            if step > BEGINS:
                self.of.setdefault(name, p.detach().clone()).lerp_(p.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"of": dict(self.of)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Whole tensors."""
        like = dict(self.model.named_parameters())
        self.of = {
            name: distribute_tensor(whole, like[name].device_mesh, like[name].placements)
            for name, whole in saved["of"].items()
        }


class Training:
    def __init__(self, root: Path) -> None:
        self.model, self.optim = make("fsdp", 40)
        self.average = Average(self.model)
        self.ckpt = holdfast.Checkpointer(
            root,
            {"model": self.model, "optim": self.optim, "average": self.average},
            every=holdfast.Every(delta=1),
            delta=holdfast.Delta(),
            on_error="raise",
            deadline_s=120,
        )

    def step(self, number: int) -> None:
        torch.manual_seed(number)
        self.model(torch.randn(4, 40)).square().mean().backward()
        self.optim.step()
        self.optim.zero_grad()
        self.average.update(number)
        self.ckpt.step(number)
        self.ckpt.wait()

    def held(self) -> list[torch.Tensor]:
        """Weights and their average, gathered whole by torch; collective."""
        both = [*self.model.parameters(), *self.average.of.values()]
        return [t.full_tensor() if isinstance(t, DTensor) else t for t in both]


def dies(root: Path) -> None:
    run = Training(root)
    for number in range(1, ENDS + 1):
        run.step(number)
    held = run.held()
    if dist.get_rank() == 0:
        torch.save(held, root.parent / "held.pt")
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def goes_on(root: Path) -> None:
    run = Training(root)
    assert run.ckpt.restore() == ENDS
    held, expected = run.held(), torch.load(root.parent / "held.pt")
    assert len(held) == len(expected) == 8
    assert all(map(torch.equal, held, expected))
    run.step(ENDS + 1)
    run.ckpt.close()
    again = Training(root)
    assert again.ckpt.restore() == ENDS + 1
    assert all(map(torch.equal, again.held(), run.held()))
    again.ckpt.close()
