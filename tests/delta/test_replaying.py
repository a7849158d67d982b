"""A replay makes the recorded steps again: each once, in their order, with the same hooks around them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import holdfast
from holdfast.delta.offline import replay_to
from holdfast.errors import NotRecoverable, UsageError
from holdfast.store import open_store
from memory.zygote import Lives

from .test_corners import Plain
from .test_exact import STEPS, Run, check_equal, check_restored, checkpointer, recorded, root  # noqa: F401

pytestmark = pytest.mark.slow


@pytest.fixture
def halved() -> Iterator[None]:
    """Gradients, before the step of any optimizer there is."""

    def hook(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)

    handle = register_optimizer_step_pre_hook(hook)
    yield
    handle.remove()


@pytest.mark.usefixtures("halved")
def test_a_hook_on_all_optimizers(root: Path) -> None:  # noqa: F811
    """What is recorded is what came of it."""
    check_restored(root, Plain, recorded(root, Plain))


def test_the_order_of_the_optimizers(root: Path) -> None:  # noqa: F811
    """That of their steps, not that of the state."""

    class Two(Plain):
        def __init__(self) -> None:
            super().__init__(lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1))
            self.first = torch.optim.AdamW(self.model.first.parameters(), lr=0.1, weight_decay=0.9)
            self.state["second_in_the_state"] = self.first

        def step(self, number: int) -> None:
            self.first.zero_grad()
            for p in self.model.first.parameters():
                p.grad = torch.randn_like(p)
            self.first.step()
            super().step(number)

        def everything(self) -> dict[str, Any]:
            states = [self.first.state.get(p, {}) for p in self.model.parameters()]
            return super().everything() | {"first": copy.deepcopy(states)}

    check_restored(root, Two, recorded(root, Two))


class Clipped(torch.optim.Adam):
    """Its step calls that of its class, which has hooks of its own as soon as there is one of it."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.01)
        return super().step(closure)


def test_a_step_that_calls_that_of_its_class(root: Path) -> None:  # noqa: F811
    torch.optim.Adam(nn.Linear(2, 2).parameters())

    def new() -> Run:
        return Plain(lambda p: Clipped(p, lr=0.01))

    check_restored(root, new, recorded(root, new))


def test_a_step_that_failed_is_not_around_the_next(root: Path) -> None:  # noqa: F811
    """It is called again, and that is a second step."""

    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                self.fails = False
                raise RuntimeError("out of memory")
            return super().step(closure)

    run = Plain(lambda p: Failing(p, lr=0.1))
    with checkpointer(root, run) as ckpt:
        for number in (1, 2):
            run.step(number)
            ckpt.step(number)
        run.optim.fails = True  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="out of memory"):
            run.step(3)
        with pytest.raises(UsageError, match="two steps between two calls"):
            run.optim.step()


class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([{"params": g["params"]} for g in inner.param_groups], {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        self.inner.step(closure)


def test_an_optimizer_inside_another(root: Path) -> None:  # noqa: F811
    """A replay would make its step twice."""
    run = Plain()
    run.state |= {"optim": Lookahead(run.optim), "optim_inner": run.optim}
    with checkpointer(root, run) as ckpt:
        run.state["optim"].step()
        ckpt.step(1)
        with pytest.raises(UsageError, match="record 'optim', whose step makes that of 'optim_in"):
            run.state["optim"].step()


# -- hooks after a step ---------------------------------------------------------------------------


def clamp(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.clamp_(-0.1, 0.1)


class Clamped(Plain):
    def __init__(self, hooked: bool = True) -> None:
        super().__init__()
        del self.told["mean"]
        if hooked:
            self.optim.register_step_post_hook(clamp)

    def step(self, number: int) -> None:
        self.told["mean"] = 0.0
        super().step(number)
        del self.told["mean"]


def test_hooks_after_a_step(root: Path) -> None:  # noqa: F811
    """They are called in a replay, too, if they are there."""
    expected = recorded(root, Clamped)
    with warnings.catch_warnings():
        warnings.simplefilter("error", holdfast.HoldfastWarning)
        check_restored(root, Clamped, expected)


def test_hooks_after_a_step_that_are_not_there(root: Path) -> None:  # noqa: F811
    recorded(root, Clamped)
    with (
        checkpointer(root, Clamped(hooked=False)) as ckpt,
        pytest.warns(
            holdfast.HoldfastWarning, match="'optim' had 1 hooks after its steps .* 0 now"
        ),
    ):
        assert ckpt.restore() == STEPS
    with pytest.raises(UsageError, match="'optim' had hooks after its steps"):
        replay_to(open_store(str(root)), STEPS)


def test_hooks_on_all_optimizers_after_a_step(root: Path) -> None:  # noqa: F811
    """They follow ours: what they write is seen, as what the script writes itself."""
    handle = register_optimizer_step_post_hook(clamp)
    try:
        with pytest.raises(UsageError, match=r"outside optimizer.step"):
            recorded(root, Plain)
    finally:
        handle.remove()


# -- several ranks --------------------------------------------------------------------------------


@pytest.mark.distributed
def test_a_step_that_one_rank_skips(lives: Lives) -> None:
    """Its kernel alone was told so by a scaler.  On another layout nobody could do that again."""
    told = lives.live(nodes=[0, 0], case="delta.watched_cases:stages_dies", grace_s=20)
    assert [one.status for one in told] == [-9, -9], lives.errors()
    told = lives.live(nodes=[0, 0], case="delta.watched_cases:stages_again")
    assert [one.status for one in told] == [0, 0], lives.errors()
    with pytest.raises(NotRecoverable, match="cannot be replayed on another layout"):
        replay_to(open_store(str(lives.place / "root")), STEPS)
