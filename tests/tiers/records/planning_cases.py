"""What ranks do together in `test_planning`: pipeline stages, each with optimizer steps of its own.

After each step they exchange something, as most scripts do for their log.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import holdfast

DURABLE = 9
LAST = 14


class Stages:
    """One stage of this rank, and a loss scaler of its own."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.rank = dist.get_rank()
        torch.manual_seed(self.rank)
        self.layer = nn.Linear(8, 8, dtype=dtype)
        self.model = nn.ModuleDict({str(self.rank): self.layer})
        self.optim = torch.optim.AdamW(self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.state: dict[str, Any] = {
            "model": [self.model], "optim": self.optim, "scaler": self.scaler
        }  # fmt: skip
        self.step, self.given = 0, self.layer.weight.dtype

    def open(self, root: Path) -> holdfast.Checkpointer:
        every, delta = holdfast.Every(durable=DURABLE, delta=1), holdfast.Delta()
        return holdfast.Checkpointer(root, self.state, every=every, delta=delta, deadline_s=300)

    def train(
        self, ckpt: holdfast.Checkpointer, *, skips: bool = False, mixes: bool = False
    ) -> None:
        self.optim.zero_grad()
        x = torch.randn(4, 8, dtype=self.given)
        self.scaler.scale(self.layer(x).square().mean()).backward()
        grad = self.layer.weight.grad
        assert grad is not None
        if skips:
            grad.fill_(float("inf"))
        if mixes:
            self.layer.weight.grad = grad.t().contiguous().t()
        self.scaler.step(self.optim)
        self.scaler.update()
        dist.all_reduce(torch.ones(1))
        self.step += 1
        ckpt.step(self.step)

    def weights(self) -> list[Any]:
        return [p.detach().clone() for p in self.model.parameters()]


def skipped(root: Path) -> None:
    """The first stage's scaler skips the step at which records begin, of a run and of its restart."""
    stages = Stages()
    before: list[Any] = []
    for start in (0, 5):
        with warnings.catch_warnings():
            warnings.simplefilter("error", holdfast.HoldfastWarning)
            with stages.open(root) as ckpt:
                assert ckpt.restore() == stages.step == start
                assert all(map(torch.equal, before, stages.weights()))
                for step in range(start, start + 5):
                    skips = stages.rank == 0 and step in (1, 5)
                    stages.train(ckpt, skips=skips)
                    ckpt.wait()
        before, stages, last = stages.weights(), Stages(), stages.step
        stages.step = last


def failed(root: Path) -> None:
    """No record of the second stage can be made; then somebody writes to the first one's weights."""
    stages = Stages(torch.bfloat16)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", holdfast.HoldfastWarning)
        with stages.open(root) as ckpt:
            for step in range(1, LAST + 1):
                if stages.rank == 0 and step == 5:
                    with torch.no_grad():
                        stages.layer.weight.mul_(0.5)
                stages.train(ckpt, mixes=stages.rank == 1 and step == 3)
                ckpt.wait()
    texts = [str(one.message) for one in told if one.category is holdfast.HoldfastWarning]
    late = ("did not answer", " has not ")
    assert not [text for text in texts if any(words in text for words in late)], texts
    again = Stages(torch.bfloat16)
    with again.open(root) as ckpt:
        assert ckpt.restore() == LAST
        assert all(map(torch.equal, again.weights(), stages.weights()))
