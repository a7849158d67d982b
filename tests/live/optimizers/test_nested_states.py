"""A new kind of optimizer, whose states are dicts and lists within dicts: it needs nothing of holdfast."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import holdfast

LAST, EVERY = 7, 4


class Factored(torch.optim.Optimizer):
    """Means of rows, a large table, the last gradients and a counter, each somewhere inside."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p] or self._new(p)
            factors, history, count = state["factors"], state["history"], state["count"]
            factors["rows"].lerp_(p.grad.reshape(len(p), -1).mean(1), 0.1)
            factors["inner"]["whole"].mul_(0.9).add_(p.grad)
            factors["table"].add_(p.grad.sum())
            history[count["n"] % 2].copy_(p.grad)
            count["n"] += 1
            rows = factors["rows"].reshape(-1, *[1] * (p.ndim - 1))
            mean = factors["table"].mean()
            p.sub_(factors["inner"]["whole"] + rows + history[0] + mean, alpha=0.01)

    def _new(self, p: torch.Tensor) -> dict[str, Any]:
        self.state[p] = {
            "factors": {
                "rows": torch.zeros(len(p)),
                "table": torch.zeros(200, 200),  # too large for the extras
                "inner": {"whole": torch.zeros_like(p)},
            },
            "history": [torch.zeros_like(p), torch.zeros_like(p)],
            "count": {"n": 0},
        }
        return self.state[p]


class Run:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 8)
        self.optim = Factored(self.model.parameters())
        self.state: dict[str, Any] = {"model": self.model, "optim": self.optim}

    def train(self, ckpt: holdfast.Checkpointer, begin: int, until: int) -> None:
        for number in range(begin + 1, until + 1):
            self.model(torch.randn(4, 8)).square().mean().backward()
            self.optim.step()
            self.optim.zero_grad()
            ckpt.step(number)
            ckpt.wait()

    def values(self) -> list[Any]:
        params = list(self.model.parameters())
        found = [*params, *tree_leaves([dict(self.optim.state[p]) for p in params])]
        return [x.tolist() if isinstance(x, torch.Tensor) else x for x in found]


@pytest.mark.parametrize("tier", ["durable", "delta"])
def test_a_run_with_nested_states_goes_on_bit_for_bit(tmp_path: Path, tier: str) -> None:
    """From a full save, and from records; with no notice of states that are put where there were none."""
    delta = holdfast.Delta() if tier == "delta" else None
    options: dict[str, Any] = {
        "every": holdfast.Every(durable=EVERY, delta=delta and 1),
        "delta": delta,
        "on_error": "raise",
    }
    run = Run()
    with holdfast.Checkpointer(tmp_path, run.state, **options) as ckpt:
        run.train(ckpt, 0, LAST)
    expected = run.values()
    again = Run()
    with warnings.catch_warnings():
        warnings.simplefilter("error", holdfast.HoldfastWarning)
        with holdfast.Checkpointer(tmp_path, again.state, **options) as ckpt:
            step = ckpt.restore()
            assert step == (LAST if tier == "delta" else EVERY)
            again.train(ckpt, step, LAST)
    assert again.values() == expected
