"""A framework that holdfast knows nothing of saves and restores, by telling where its values are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast import sources
from holdfast.errors import UsageError
from holdfast.testing import SourceTests, Training
from integrations.frameworks import toy
from integrations.frameworks.mixed import Mixed
from system.distributed.launch import launch


def run(seed: int) -> Training:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).bfloat16()
    optimizer = toy.Optimizer(model)

    def train() -> None:
        model.zero_grad()
        inputs = torch.arange(20.0).reshape(4, 5).bfloat16() / (optimizer.steps + 10)
        model(inputs).square().mean().backward()
        optimizer.step()

    return Training({"model": model, "optim": optimizer}, train)


class TestToy(SourceTests):
    @pytest.fixture
    def build(self) -> Callable[[int], Training]:
        return run


def mixed_run(seed: int) -> Training:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).bfloat16()
    optimizer = Mixed(model)

    def train() -> None:
        model.zero_grad()
        model(torch.ones(4, 5).bfloat16()).square().mean().backward()
        optimizer.step()

    return Training({"model": model, "optim": optimizer}, train)


class TestMixed(SourceTests):
    """A framework whose masters are whole, each with states of its own."""

    @pytest.fixture
    def build(self) -> Callable[[int], Training]:
        return mixed_run


def test_it_loads_into_plain_torch(tmp_path: Path) -> None:
    """Names and coordinates are those of the weights: a checkpoint says nothing of the framework."""
    saved = run(0)
    for _ in range(3):
        saved.train()
    holdfast.save(tmp_path, saved.state, step=3)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    holdfast.load(tmp_path, {"model": model, "optim": optimizer}, cast=True)
    whole = saved.state["optim"]
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), whole.master)
    assert optimizer.param_groups[0]["lr"] == 0.01
    states = whole.inner.state[whole.master]
    for name in ("exp_avg", "exp_avg_sq"):
        mine = [optimizer.state[p][name].reshape(-1) for p in model.parameters()]
        assert torch.equal(torch.cat(mine), states[name])
    assert all(optimizer.state[p]["step"] == 3 for p in model.parameters())


@pytest.mark.distributed
def test_over_ranks(tmp_path: Path) -> None:
    """Saved on two ranks, restored there and on three, whose pieces of the master are others."""
    root, file = tmp_path / "root", tmp_path / "expected.pt"
    launch("integrations.frameworks.ranks", 2, "save", root, file).check()
    launch("integrations.frameworks.ranks", 3, "load", root, file).check()


# -- the suite finds what is told wrong -----------------------------------------------------------


def no_refresh(self: toy.ToySource) -> None:
    """Weights stay those of the run before."""


def no_poison(self: toy.ToySource) -> None:
    """Weights stay as they were."""


def no_put_extras(self: toy.ToySource, saved: dict[str, Any]) -> None:
    """The count of steps is lost."""


def copies(self: toy.ToySource, p: torch.Tensor) -> sources.Master:
    """What is put back goes nowhere."""
    master = self.masters[id(p)]
    cut = master.cut
    assert cut is not None
    return replace(master, cut=lambda like: [(box, part.clone()) for box, part in cut(like)])


def shifted(self: toy.ToySource, p: torch.Tensor) -> sources.Master:
    """Half of each weight is left out."""
    cut = sources.flat_cut(p.shape, 0, p.numel() // 2)
    return replace(self.masters[id(p)], cut=cut)


@pytest.mark.parametrize(
    ("method", "wrong", "test"),
    [
        ("refresh", no_refresh, "test_a_fresh_run_goes_on_as_the_saved_one"),
        ("put_extras", no_put_extras, "test_a_trained_run_goes_on_as_the_saved_one"),
        ("poison", no_poison, "test_poison_leaves_nothing_that_trains"),
        ("master", copies, "test_parts_are_views_that_make_up_the_weight"),
        ("master", shifted, "test_parts_are_views_that_make_up_the_weight"),
    ],
)
def test_the_suite_finds(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    method: str,
    wrong: Callable[..., Any],
    test: str,
) -> None:
    monkeypatch.setattr(toy.ToySource, method, wrong)
    arguments = [run] if "goes_on" not in test else [run, tmp_path]
    with pytest.raises(AssertionError):
        getattr(SourceTests(), test)(*arguments)


# -- registering ----------------------------------------------------------------------------------


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.sources._registered", [])
    return


@pytest.mark.usefixtures("unregistered")
def test_what_nobody_tells_of_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a .*toy\.Optimizer cannot be saved"):
        holdfast.save(tmp_path, run(0).state, step=0)


def test_an_optimizer_without_a_source_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(toy.Toy, "sources", lambda self, modules, state: {})
    with pytest.raises(UsageError, match="'optim': its framework tells nothing of this Optimizer"):
        holdfast.save(tmp_path, run(0).state, step=0)


@pytest.mark.usefixtures("unregistered")
def test_a_framework_is_registered_once() -> None:
    framework = toy.Toy()
    for _ in range(2):
        sources.register(framework)
    assert sources.frameworks().count(framework) == 1


@pytest.mark.usefixtures("unregistered")
@pytest.mark.parametrize("value", [None, object(), toy.ToySource])
def test_what_is_no_framework_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"methods of holdfast\.sources\.Framework"):
        sources.register(value)
