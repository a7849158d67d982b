"""DeepSpeed engines continue from holdfast's conversion: each ZeRO stage, other numbers of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import holdfast

from . import universal
from .launch import launch

pytestmark = [pytest.mark.distributed, pytest.mark.beside]
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

NOISE = 1e-5
"""Relative, of losses over 50 steps: DeepSpeed averages gradients over ranks and flattens parameters, so
sums may be taken in another order than plain torch takes them."""


@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (2, 3), (3, 2), (3, 1)])
def test_an_engine_continues(tmp_path: Path, stage: int, ranks: int) -> None:
    """One group at stage 3: there DeepSpeed's loader gives all groups the hyper-parameters of the first,
    and one and the same tensor as their step, which torch's optimizers then count up once for each."""
    one = stage == 3
    model, optim = universal.made(one)
    universal.train(model, optim, 0, universal.STEPS)
    names = {p: n for n, p in model.named_parameters()}
    expected = {n: p.detach().clone() for n, p in model.named_parameters()}
    for p, states in optim.state.items():
        for kind in ("exp_avg", "exp_avg_sq"):
            expected[f"{names[p]}.{kind}"] = states[kind].clone()
    holdfast.save(tmp_path / "run", {"model": model, "optim": optim}, step=universal.STEPS)
    holdfast.convert(tmp_path / "run", tmp_path / "ds", to="deepspeed")
    launch("universal", ranks, tmp_path / "ds", tmp_path, stage, int(one), forked=True).check()
    found = torch.load(tmp_path / "state.pt")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["global_steps"] == universal.STEPS + universal.MORE
    for group, mine in zip(told["hyper"], optim.param_groups):
        assert {k: list(v) if k == "betas" else v for k, v in group.items()} == {
            k: list(mine[k]) if k == "betas" else mine[k] for k in group
        }
    losses = universal.train(model, optim, universal.STEPS, universal.MORE)
    worst = max(abs(a - b) / abs(b) for a, b in zip(told["losses"], losses))
    print(f"stage {stage}, {ranks} ranks: losses of {universal.MORE} steps differ by {worst:.1e}")
    assert worst <= NOISE
