"""Optimizers that hooks of the script step in backward: noticed if they are not handed over, only then."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import HoldfastWarning, UsageError

By = dict[torch.Tensor, torch.optim.Optimizer]


class Stepper:
    def __init__(self, by: By) -> None:
        self.by = by
        every = [p for one in by.values() for p in one.param_groups[0]["params"]]
        self.unused = torch.optim.SGD(every)

    def now(self, p: torch.Tensor) -> None:
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


def in_a_partial(by: By) -> Callable[[torch.Tensor], None]:
    return partial(lambda by, p: by[p].step(), by)


def unreadable(by: By) -> Callable[[torch.Tensor], None]:
    """Calls that lead to them, and no name."""
    steps = {p: getattr(one, "st" + "ep") for p, one in by.items()}
    return lambda p: steps[p]()


HOOKS = [in_a_closure, in_a_partial, unreadable, lambda by: Stepper(by).now]


def hooked(make: Callable[[By], Callable[[torch.Tensor], None]], seed: int = 0) -> tuple[Any, By]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, bias=False))
    by: By = {p: torch.optim.Adam([p]) for p in model.parameters()}
    hook = make(by)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    return model, by


def backward(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()


@pytest.fixture
def no_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", HoldfastWarning)
        yield


@pytest.mark.filterwarnings("ignore:.*hooks are called behind their gradients")
@pytest.mark.parametrize("make", HOOKS)
def test_optimizers_that_a_hook_steps_are_named(tmp_path: Path, make: Any) -> None:
    model, by = hooked(make)
    with holdfast.Checkpointer(tmp_path, {"model": model}) as ckpt:
        backward(model)
        for step in (1, 2):
            with pytest.raises(
                UsageError, match=r"would be lost: Adam of 0\.weight, Adam of 0\.bias, "
            ):
                ckpt.save(step).wait()
        *most, _ = by.values()
        ckpt.state["optim"] = most
        with pytest.raises(UsageError, match=r"would be lost: Adam of 1\.weight \(step 3\)\n"):
            ckpt.save(3).wait()
        assert not holdfast.steps(tmp_path)
        ckpt.state["optim"] = list(by.values())
        ckpt.save(4).wait()
        ckpt.state.pop("optim")
        ckpt.state["model"] = model.state_dict()
        ckpt.save(5).wait()
    assert holdfast.steps(tmp_path) == [4, 5]


@pytest.mark.filterwarnings("ignore:.*hooks are called behind their gradients")
def test_a_save_before_their_first_step_has_nothing_to_lose(tmp_path: Path) -> None:
    model, by = hooked(in_a_closure)
    with holdfast.Checkpointer(tmp_path, {"model": model}, on_error="raise") as ckpt:
        ckpt.save(0).wait()
        backward(model)
        with pytest.raises(UsageError, match=r"would be lost: Adam of 0\.weight"):
            ckpt.save(1).wait()
        by.clear()  # they are gone, so nothing of them can be lost
        ckpt.save(2).wait()


def test_the_way_out_goes_on(tmp_path: Path, no_warnings: None) -> None:
    model, by = hooked(in_a_closure)
    with holdfast.Checkpointer(tmp_path, {"model": model, "optim": list(by.values())}) as ckpt:
        backward(model)
        ckpt.save(1)
    again, by = hooked(in_a_closure, seed=1)
    backward(again)
    state = {"model": again, "optim": [by[p] for p in again.parameters()]}
    with holdfast.Checkpointer(tmp_path, state) as ckpt:
        assert ckpt.restore() == 1
        for one in (model, again):
            backward(one)
        ckpt.save(2)
    assert all(map(torch.equal, model.parameters(), again.parameters()))


def test_an_object_that_saves_them_is_taken_at_its_word(tmp_path: Path, no_warnings: None) -> None:
    keeper: list[Saved] = []

    def make(by: By) -> Callable[[torch.Tensor], None]:
        keeper.append(Saved(by))
        return keeper[0].now

    model, _ = hooked(make)
    with holdfast.Checkpointer(tmp_path, {"model": model, "optim": keeper[0]}) as ckpt:
        backward(model)
        ckpt.save(1).wait()


def test_what_one_save_cannot_see_is_told(tmp_path: Path, no_warnings: None) -> None:
    """Nor can the first one of a `Checkpointer` that is made after the training."""
    model, by = hooked(in_a_closure)
    backward(model)
    *most, _ = by.values()
    told = r"model\.1\.weight: hooks are called behind their gradients.*\[hooked-parameters\]"
    with pytest.warns(HoldfastWarning, match=told):
        holdfast.save(tmp_path, {"model": model, "optim": most}, step=1)
    with (
        pytest.warns(HoldfastWarning, match=told),
        holdfast.Checkpointer(tmp_path / "run", {"model": model, "optim": most}) as ckpt,
    ):
        ckpt.save(1).wait()
    holdfast.save(tmp_path, {"model": model, "optim": list(by.values())}, step=2)
    holdfast.save(tmp_path, {"model": model.state_dict()}, step=3)


def test_a_hook_that_steps_nothing(tmp_path: Path) -> None:
    """It looks at an optimizer that is not handed over, for the weights alone are wanted."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rates: list[float] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(
            lambda p: rates.append(optimizer.param_groups[0]["lr"])
        )
    with holdfast.Checkpointer(tmp_path, {"model": model}) as ckpt:
        backward(model)
        optimizer.step()
        with pytest.warns(HoldfastWarning, match=r"model\.weight, model\.bias: hooks are called"):
            ckpt.save(1).wait()
        ckpt.save(2).wait()
    assert len(rates) == 2 and holdfast.steps(tmp_path) == [1, 2]
