"""Parameters that only an optimizer has: float32 masters of a bfloat16 model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast


class Mixed:
    """A bfloat16 model whose masters are in nobody's module."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(7, 5).to(torch.bfloat16)
        self.masters = [p.detach().float() for p in self.model.parameters()]
        self.optim = torch.optim.AdamW(self.masters, lr=1e-4)
        self.state: dict[str, Any] = {"model": self.model, "optim": self.optim}

    def step(self) -> None:
        self.model.zero_grad()
        self.model(torch.randn(3, 7, dtype=torch.bfloat16)).float().square().mean().backward()
        for master, p in zip(self.masters, self.model.parameters()):
            assert p.grad is not None
            master.grad = p.grad.float()
        self.optim.step()
        with torch.no_grad():
            for master, p in zip(self.masters, self.model.parameters()):
                p.copy_(master)

    def everything(self) -> list[torch.Tensor]:
        moments = [s[k] for s in self.optim.state.values() for k in sorted(s)]
        return [t.detach().clone() for t in (*self.model.parameters(), *self.masters, *moments)]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def test_they_are_saved_with_their_optimizer(tmp_path: Path) -> None:
    run = Mixed(0)
    for _ in range(20):
        run.step()
    holdfast.save(tmp_path, run.state, step=20)
    again = Mixed(1)
    assert holdfast.load(tmp_path, again.state) == 20
    assert equal(again.everything(), run.everything())
    assert not all(torch.equal(m, m.bfloat16().float()) for m in again.masters)


def test_those_that_are_in_the_state_are_saved_once(tmp_path: Path) -> None:
    run = Mixed(0)
    run.state["masters"] = {"of": run.masters}
    run.step()
    holdfast.save(tmp_path, run.state, step=1)
    names = holdfast.open(tmp_path).names()
    assert {"masters.of[0]", "masters.of[1]"} <= set(names)
    assert not [n for n in names if n.endswith(".value")]
