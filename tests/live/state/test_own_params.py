"""Parameters that only an optimizer has: float32 masters of a bfloat16 model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import StateMismatch


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


class Alike(Mixed):
    """Masters of weights of one shape, in the order of a model whose parts may come in another."""

    def __init__(self, seed: int, names: str = "ab", turned: bool = False) -> None:
        torch.manual_seed(seed)
        parts = {n: nn.Linear(5, 5) for n in names}
        for part in parts.values():
            nn.init.zeros_(part.bias)
        self.model = nn.ModuleDict(parts).to(torch.bfloat16)
        params = list(self.model.parameters())[:: -1 if turned else 1]
        self.masters = [p.detach().float() for p in params]
        self.optim = torch.optim.AdamW(self.masters, lr=1e-4)
        self.state = {"model": self.model, "optim": self.optim}

    def step(self, number: int = 0) -> None:
        for n, master in enumerate(self.masters):
            master.grad = torch.randn_like(master) + n
        self.optim.step()
        of = {id(p): p for p in self.model.parameters()}
        for master, p in zip(self.masters, of.values()):
            p.data.copy_(master)


@pytest.mark.parametrize("before", [0, 3], ids=["fresh", "trained"])
def test_masters_of_weights_of_one_shape_are_known_by_these(before: int, tmp_path: Path) -> None:
    """No word in the same order; in another one of the model, or of the masters, they are refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = Alike(0)
        for _ in range(before):
            run.step()
        holdfast.save(tmp_path, run.state, step=1)
        again = Alike(1)
        holdfast.load(tmp_path, again.state)
        assert equal(again.everything(), run.everything())
        for other in (Alike(1, "ba"), Alike(1, turned=True)):
            with pytest.raises(StateMismatch, match="nothing names these parameters"):
                holdfast.load(tmp_path, other.state)
