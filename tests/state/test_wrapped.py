"""Optimizers around optimizers: no state is lost unnoticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import UsageError


class Lookahead(torch.optim.Optimizer):
    """Slow weights of its own, around an optimizer that has its own state (as in several libraries)."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, {})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["slow"] = p.detach().clone()

    def step(self, closure: Any = None) -> None:
        self.base.step()


class Sharing(torch.optim.Optimizer):
    """Around an optimizer whose state it shows as its own (as Accelerate's)."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, {})
        self.state = base.state

    def step(self, closure: Any = None) -> None:
        self.base.step()


def trained(kind: type) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    base = torch.optim.Adam(model.parameters())
    outer = kind(base)
    model(torch.ones(3)).sum().backward()
    outer.step()
    return model, outer, base


def test_an_inner_optimizer_whose_state_would_be_lost_is_refused(tmp_path: Path) -> None:
    model, outer, base = trained(Lookahead)
    with pytest.raises(UsageError, match="state would be lost"):
        holdfast.save(tmp_path, {"model": model, "optim": outer}, step=1)
    holdfast.save(tmp_path, {"model": model, "optim": outer, "inner": base}, step=1)
    with holdfast.open(tmp_path) as found:
        assert {"optim.weight.slow", "inner.weight.exp_avg"} <= set(found.names())
    other, theirs, their_base = trained(Lookahead)
    with pytest.raises(UsageError, match="state would be lost"):
        holdfast.load(tmp_path, {"model": other, "optim": theirs})
    holdfast.load(tmp_path, {"model": other, "optim": theirs, "inner": their_base})
    for a, b in ((outer, theirs), (base, their_base)):
        for p, q in zip(model.parameters(), other.parameters()):
            assert all(torch.equal(v, b.state[q][k]) for k, v in a.state[p].items())


def test_a_shared_state_is_saved_once(tmp_path: Path) -> None:
    model, outer, base = trained(Sharing)
    holdfast.save(tmp_path, {"model": model, "optim": outer}, step=1)
    other, theirs, their_base = trained(Sharing)
    holdfast.load(tmp_path, {"model": other, "optim": theirs})
    for p, q in zip(model.parameters(), other.parameters()):
        assert all(torch.equal(v, their_base.state[q][k]) for k, v in base.state[p].items())
