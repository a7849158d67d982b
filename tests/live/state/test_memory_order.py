"""States that lie transposed in memory do so after a restore: products with them are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import FormatError
from holdfast.live.restore.targets import empty_in


class Transposing(torch.optim.Optimizer):
    """Keeps a basis as the transposed of what it has computed."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            side = p.grad @ p.grad.T if p.ndim == 2 else torch.outer(p.grad, p.grad)
            if "basis" not in state:
                state["basis"] = side.clone().t()
                state["like"] = p.grad.clone().t().contiguous().t()
                state["inside"] = [side.clone().t(), {"deep": side.clone().t()}]
            first, second = state["inside"]
            for basis in (state["basis"], first, second["deep"]):
                basis.lerp_(side, 0.5)
                p.sub_(0.01 * (basis @ p.grad))


def build(seed: int) -> tuple[nn.Module, Transposing]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 300), nn.Linear(300, 16))
    return model, Transposing(model.parameters())


def train(model: nn.Module, optim: Transposing, steps: range) -> list[torch.Tensor]:
    for n in steps:
        torch.manual_seed(100 + n)
        optim.zero_grad()
        model(torch.randn(8, 24)).square().mean().backward()
        optim.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("stepped", [False, True])
def test_it_lies_as_it_did_and_goes_on_to_the_bit(tmp_path: Path, stepped: bool) -> None:
    """Also in lists and dicts, which a restore makes anew; small tensors and large ones."""
    model, optim = build(0)
    train(model, optim, range(2))
    holdfast.save(tmp_path, {"model": model, "optim": optim}, step=2)
    expected = train(model, optim, range(2, 5))

    model, optim = build(1)
    if stepped:
        train(model, optim, range(7, 8))
    holdfast.load(tmp_path, {"model": model, "optim": optim})
    states = [optim.state[p] for p in model.parameters() if p.ndim == 2]
    assert all(not s["basis"].is_contiguous() and s["basis"].t().is_contiguous() for s in states)
    assert all(not s["like"].is_contiguous() for s in states)
    inside = [t for s in states for t in (s["inside"][0], s["inside"][1]["deep"])]
    assert all(not t.is_contiguous() and t.t().is_contiguous() for t in inside)
    assert all(map(torch.equal, train(model, optim, range(2, 5)), expected))


def test_channels_last_states_are_made_like_their_parameter(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters())

    model, optim = build()
    model(torch.randn(1, 2, 4, 4)).sum().backward()
    optim.step()
    holdfast.save(tmp_path, {"model": model, "optim": optim}, step=1)
    assert "order" not in holdfast.open(tmp_path).manifest.extras["optim"]["$optimizer"]
    model, optim = build()
    holdfast.load(tmp_path, {"model": model, "optim": optim})
    moment = optim.state[model.weight]["exp_avg"]
    assert moment.stride() == model.weight.stride() and not moment.is_contiguous()


@pytest.mark.parametrize("order", [[0], [0, 0], [1, 2], [0, 1, 2]])
def test_an_order_that_is_none_is_refused(order: list[int]) -> None:
    with pytest.raises(FormatError, match=r"'o\.w\.basis' of shape \(2, 3\) lies in the order"):
        empty_in(order, (2, 3), torch.float32, torch.device("cpu"), "o.w.basis")
