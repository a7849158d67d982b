"""Optimizers that hooks of the script step in backward: noticed if they are not handed over, only then."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import UsageError

By = dict[torch.Tensor, torch.optim.Optimizer]
BY_NAME_OF_THE_MODULE: By = {}


def named_by_the_module(p: torch.Tensor) -> None:
    step_of_one(p)


def step_of_one(p: torch.Tensor) -> None:
    BY_NAME_OF_THE_MODULE[p].step()


class Stepper:
    def __init__(self, by: By) -> None:
        self.by = by

        every = [p for one in by.values() for p in one.param_groups[0]["params"]]
        self.unused = torch.optim.SGD(every)

    def now(self, p: torch.Tensor) -> None:
        self.by[p].step()

    def __call__(self, p: torch.Tensor) -> None:
        self.by[p].step()


class Saved(Stepper):
    """An object of the script that saves the optimizers that it has."""

    def state_dict(self) -> dict[str, Any]:
        return {"all": [one.state_dict() for one in self.by.values()]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for one, state in zip(self.by.values(), saved["all"]):
            one.load_state_dict(state)


def in_a_closure(by: By) -> Callable[[torch.Tensor], None]:
    def hook(p: torch.Tensor) -> None:
        by[p].step()

    return hook


def decorated(by: By) -> Callable[[torch.Tensor], None]:
    @torch.no_grad()
    def hook(p: torch.Tensor) -> None:
        by[p].step()

    return hook


def in_a_partial(by: By) -> Callable[[torch.Tensor], None]:
    return partial(lambda by, p: by[p].step(), by)


def in_a_global(by: By) -> Callable[[torch.Tensor], None]:
    BY_NAME_OF_THE_MODULE.update(by)
    return named_by_the_module


def in_an_object_of_the_closure(by: By) -> Callable[[torch.Tensor], None]:
    stepper = Stepper(by)
    return lambda p: stepper.by[p].step()


HOOKS = [
    in_a_closure,
    decorated,
    in_a_partial,
    in_a_global,
    in_an_object_of_the_closure,
    Stepper,
    lambda by: Stepper(by).now,
]


def hooked(make: Callable[[By], Callable[[torch.Tensor], None]], seed: int = 0) -> tuple[Any, By]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, bias=False))
    by: By = {p: torch.optim.Adam([p]) for p in model.parameters()}
    hook = make(by)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    model(torch.ones(2, 4)).sum().backward()
    return model, by


@pytest.mark.parametrize("make", HOOKS)
def test_optimizers_that_a_hook_steps_are_named(tmp_path: Path, make: Any) -> None:
    model, by = hooked(make)
    with pytest.raises(
        UsageError, match=r"would be lost: .*Adam of 0\.weight, .*Adam of 0\.bias, "
    ):
        holdfast.save(tmp_path, {"model": model}, step=1)
    *most, _ = by.values()
    with pytest.raises(UsageError, match=r"would be lost: (SGD of 1\.weight, )?Adam of 1\.weight"):
        holdfast.save(tmp_path, {"model": model, "optim": most}, step=1)
    assert not holdfast.steps(tmp_path)
    holdfast.save(tmp_path, {"model": model, "optim": list(by.values())}, step=1)
    holdfast.save(tmp_path, {"model": model.state_dict()}, step=2)


def test_the_way_out_goes_on(tmp_path: Path) -> None:
    model, by = hooked(in_a_closure)
    holdfast.save(tmp_path, {"model": model, "optim": list(by.values())}, step=1)
    again, by = hooked(in_a_closure, seed=1)
    holdfast.load(tmp_path, {"model": again, "optim": [by[p] for p in again.parameters()]})
    for one in (model, again):
        one.zero_grad()
        one(torch.ones(2, 4)).sum().backward()
    assert all(map(torch.equal, model.parameters(), again.parameters()))


def test_an_object_that_saves_them_is_taken_at_its_word(tmp_path: Path) -> None:
    keeper: list[Saved] = []

    def make(by: By) -> Callable[[torch.Tensor], None]:
        keeper.append(Saved(by))
        return keeper[0].now

    model, _ = hooked(make)
    holdfast.save(tmp_path, {"model": model, "optim": keeper[0]}, step=1)


def test_a_hook_that_steps_nothing(tmp_path: Path) -> None:
    """It looks at an optimizer that is not handed over, for the weights alone are wanted."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rates: list[float] = []
    endless: list[Any] = []
    endless.append(endless)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(
            lambda p: rates.append(optimizer.param_groups[0]["lr"] * len(endless))
        )
    model(torch.ones(2, 4)).sum().backward()
    holdfast.save(tmp_path, {"model": model}, step=1)
