"""Optimizers around optimizers: no state is lost unnoticed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

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


class Rated(torch.optim.SGD):
    """What its steps depend on, only its own state_dict() has."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.made = 0

    def step(self, closure: Any = None) -> None:
        self.made += 1
        self.param_groups[0]["lr"] = 0.1 / self.made
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "made": self.made}


class Renamed(torch.optim.Adam):
    """Its state_dict() says nothing that is not saved."""

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        return {"state": {f"p{i}": s for i, s in found["state"].items()}} | {
            "param_groups": [{**g, "param_names": []} for g in found["param_groups"]]
        }


class Silent(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError("ask the others")


def told(root: Path, optimizer: torch.optim.Optimizer) -> list[str]:
    """Of two saves of one run."""
    model = torch.nn.Linear(3, 2)
    optimizer.add_param_group({"params": list(model.parameters())})
    model(torch.ones(3)).sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with holdfast.Checkpointer(root, {"model": model, "optim": optimizer}) as ckpt:
            for step in (1, 2):
                optimizer.step()
                ckpt.save(step)
    return [str(one.message) for one in caught]


def first() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(2))]


def test_what_only_an_optimizers_own_state_dict_has_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    state = {"model": model, "optim": Rated(model.parameters())}
    with pytest.raises(
        UsageError, match="the state_dict\\(\\) of Rated has 'made' beside states and groups"
    ):
        holdfast.save(tmp_path, state, step=1)


def test_what_is_ignored_of_an_optimizer_is_not_told(tmp_path: Path) -> None:
    assert told(tmp_path, holdfast.ignore(Rated(first()), "made")) == []


def test_an_optimizer_that_cannot_say_is_told_once(tmp_path: Path) -> None:
    (warning,) = told(tmp_path / "silent", Silent(first(), lr=0.1))
    assert "it cannot say here (NotImplementedError: ask the others)" in warning
    assert told(tmp_path / "ignored", holdfast.ignore(Silent(first(), lr=0.1), "*")) == []


def test_a_state_dict_that_adds_nothing_is_no_loss(tmp_path: Path) -> None:
    assert told(tmp_path, Renamed(first())) == []
    assert told(tmp_path / "plain", torch.optim.AdamW(first())) == []


def test_zero1_need_not_be_asked(tmp_path: Path, mesh: Any) -> None:
    """Its state_dict() fails until it is consolidated."""
    zero1 = ZeroRedundancyOptimizer(first(), torch.optim.AdamW, lr=0.1)
    assert told(tmp_path / "root", zero1) == []
