"""DeepSpeed engines continue from holdfast's conversion: each ZeRO stage, other numbers of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast

from . import universal
from .launch import launch

pytestmark = [pytest.mark.distributed]
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

NOISE = 1e-5
"""Relative, of losses over 50 steps: DeepSpeed averages gradients over ranks and flattens parameters, so
sums may be taken in another order than plain torch takes them."""


@pytest.mark.soak
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
    launch("universal", ranks, tmp_path / "ds", tmp_path, stage, int(one)).check()
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


ADAM = ["exp_avg", "exp_avg_sq", "step"]


@pytest.mark.soak
def test_what_deepspeeds_own_loader_leaves_out(tmp_path: Path) -> None:
    """What docs/how-to/convert.md says of it.  Where this fails, DeepSpeed has changed."""

    def case(stage: int, optimizer: str = "adamw", before: bool = True, **load: Any) -> Any:
        return {"stage": stage, "optimizer": optimizer, "before": before, "load": load}

    cases = [case(stage, before=False) for stage in (1, 2, 3)]
    cases += [case(stage) for stage in (1, 2, 3)]
    cases += [case(stage, name) for stage in (1, 3) for name in ("sgd", "amsgrad")]
    cases += [case(3, load_optimizer_states=False), case(3, load_module_only=True)]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    launch("universal_loader", 1, tmp_path).check()
    found = json.loads((tmp_path / "found.json").read_text())
    alone, after, others, weights = found[:3], found[3:6], found[6:10], found[10:]
    for one in alone:
        kept = {name for name, same in one["same"].items() if not same}
        assert {n for n in kept if n.startswith("0.")} == {"0.weight", "0.bias"}
        assert {"1.running_mean", "1.running_var"} <= kept
        assert one["same"]["2.weight"] and one["same"]["2.bias"]
    for one in after:
        assert all(one["same"].values()) and one["states"] == ADAM
    sgd1, amsgrad1, sgd3, amsgrad3 = others
    assert all(sgd1["same"].values()) and sgd1["states"] == ["momentum_buffer"]
    assert amsgrad1["states"] == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"]
    assert "exp_avg.pt" in sgd3["error"]
    assert amsgrad3["states"] == ADAM
    no_states, module_only = weights
    assert "*_optim_states.pt" in no_states["error"]
    assert all(module_only["same"].values())
