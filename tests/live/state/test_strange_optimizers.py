"""Containers of optimizers that other libraries bring."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import HoldfastWarning, UsageError

pytestmark = pytest.mark.soak

Make = Callable[[nn.Sequential], Any]


def build(make: Make, seed: int) -> tuple[nn.Sequential, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    return model, make(model)


def train(model: nn.Module, optimizer: Any, first: int, last: int) -> list[float]:
    found = []
    for step in range(first, last):
        x = torch.sin(torch.arange(8.0).reshape(2, 4) * (step + 1))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def check_goes_on(make: Make, root: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", HoldfastWarning)
        model, optimizer = build(make, 0)
        holdfast.save(root, {"model": model, "optim": optimizer}, step=1)  # before the first step
        train(model, optimizer, 0, 3)
        holdfast.save(root, {"model": model, "optim": optimizer}, step=3)
        expected = train(model, optimizer, 3, 6)
        model, optimizer = build(make, 1)
        holdfast.load(root, {"model": model, "optim": optimizer})
        assert train(model, optimizer, 3, 6) == expected


def two_kinds(model: nn.Sequential) -> Any:
    """Torchtitan's, of two stages with two kinds of optimizer each: four of them."""
    titan = pytest.importorskip("torchtitan.components.optimizer")
    groups = [
        titan.ParamGroupConfig(
            pattern=pattern, optimizer_name=name, optimizer_kwargs={"lr": 0.05, "foreach": False}
        )
        for pattern, name in (("bias$", "Adam"), (".*", "AdamW"))
    ]
    config = titan.OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
    return titan.OptimizersContainer(config, model_parts=[model[0], model[2]])


def one_kind(model: nn.Sequential) -> Any:
    titan = pytest.importorskip("torchtitan.components.optimizer")
    config = titan.default_adamw(lr=0.05)
    config.implementation = "for-loop"
    return titan.OptimizersContainer(config, model_parts=[model])


@pytest.mark.parametrize("make", [one_kind, two_kinds])
def test_torchtitans_container(tmp_path: Path, make: Make) -> None:
    check_goes_on(make, tmp_path)


def test_torchtitans_container_in_accelerates_wrapper(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    prepare = accelerate.Accelerator(cpu=True).prepare_optimizer

    def wrapped(model: nn.Sequential) -> Any:
        return prepare(two_kinds(model), device_placement=False)

    check_goes_on(wrapped, tmp_path)


def test_optimizers_of_a_container_in_fabrics_wrapper(tmp_path: Path) -> None:
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)

    def wrapped(model: nn.Sequential) -> Any:
        return fabric.setup_optimizers(two_kinds(model))

    check_goes_on(wrapped, tmp_path)


def test_transformers_layerwise_optimizers(tmp_path: Path) -> None:
    """Each parameter has one, in a dict of an optimizer of nothing: named, and taken as a dict."""
    trainer = pytest.importorskip("transformers.trainer_pt_utils")
    model, each = build(lambda m: {p: torch.optim.AdamW([p]) for p in m.parameters()}, 0)
    dummy = trainer.LayerWiseDummyOptimizer(optimizer_dict=each)
    message = (
        r"a LayerWiseDummyOptimizer around a AdamW \(\.optimizer_dict\[0\]\).*other parameters"
    )
    with pytest.raises(UsageError, match=message):
        holdfast.save(tmp_path, {"model": model, "optim": dummy}, step=1)
    train(model, dummy, 0, 1)
    holdfast.save(tmp_path, {"model": model, "optim": each}, step=1)


def test_a_lookahead_with_weights_of_its_own(tmp_path: Path) -> None:
    others = pytest.importorskip("pytorch_optimizer")
    model, base = build(lambda m: torch.optim.AdamW(m.parameters()), 0)
    outer = others.Lookahead(base)
    train(model, outer, 0, 2)
    with pytest.raises(UsageError, match=r"a Lookahead around a AdamW .*own"):
        holdfast.save(tmp_path, {"model": model, "optim": outer}, step=1)
