"""A replay makes the recorded steps again: each once, in their order, with the same hooks around them."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
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
from holdfast.errors import NotRecoverable, UsageError
from holdfast.store import open_store
from holdfast.tiers.records.copying import GradientCopier
from holdfast.tiers.records.offline import replay_to
from tiers.memory.zygote import Lives

from .test_corners import Plain
from .test_exact import (
    STEPS,
    Run,
    check_equal,
    check_restored,
    checkpointer,
    forget,
    recorded,
    root,  # noqa: F401
)

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


class Failing(torch.optim.SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            self.fails = False
            raise RuntimeError("out of memory")
        return super().step(closure)


@pytest.mark.parametrize("again", [False, True])
def test_a_step_that_failed(root: Path, again: bool) -> None:  # noqa: F811
    """No record has it.  It is left out, or called again, which is no second step."""

    def new() -> Plain:
        return Plain(lambda p: Failing(p, lr=0.1))

    run, saved = new(), []
    with (
        holdfast.events.listen(
            lambda e: saved.append(e.fields["step"]) if e.name == "save.call" else None
        ),
        checkpointer(root, run) as ckpt,
    ):
        for number in range(1, 6):
            run.optim.fails = number == 3  # type: ignore[attr-defined]
            try:
                run.step(number)
            except RuntimeError:
                if again:
                    run.optim.step()
            ckpt.step(number)
            expected = run.everything()
    assert saved == [1, 3, 4]  # 4 is due
    forget(root, 4)
    found = new()
    with checkpointer(root, found) as ckpt:
        assert ckpt.restore() == 5
    check_equal(found.everything(), expected)


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


def test_a_step_that_is_interrupted_before_it_begins(
    root: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by Ctrl-C while gradients are copied, which the script catches."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    run = Plain()
    with checkpointer(root, run) as ckpt:
        for number in range(1, 6):
            if number == 3:
                with monkeypatch.context() as patched:
                    patched.setattr(GradientCopier, "_copy_on_host", interrupted)
                    with pytest.raises(KeyboardInterrupt):
                        run.step(number)
            else:
                run.step(number)
            ckpt.step(number)
        expected = run.everything()
    forget(root, 4)
    found = Plain()
    with checkpointer(root, found) as ckpt:
        assert ckpt.restore() == 5
    check_equal(found.everything(), expected)


class Masked(Plain):
    """A hook after the step applies masks, which are buffers and change now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.model.register_buffer("mask", torch.ones_like(self.model.first.weight))
        self.average = copy.deepcopy(self.model.first.weight.detach())
        self.state["average"] = self.average  # type: ignore[assignment]
        self.optim.register_step_post_hook(self.apply)

    @torch.no_grad()
    def apply(self, *_: Any) -> None:
        weight = self.model.first.weight
        weight.mul_(self.model.mask).lerp_(self.average, 0.1)
        self.average.lerp_(weight, 0.05)

    def step(self, number: int) -> None:
        if number % 3 == 0:  # before the step
            self.model.mask[number % 16].zero_()
        super().step(number)
        if number % 4 == 0:  # and after it
            self.model.mask[number % 15].fill_(0.5)


def test_hooks_read_values_of_their_step(root: Path) -> None:  # noqa: F811
    check_restored(root, Masked, recorded(root, Masked))


class Keeping(torch.optim.SGD):
    """As diffGrad is published: what was the gradient is a state as it is."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                before = self.state[p].get("before")
                p.add_(p.grad, alpha=-0.1)
                if before is not None:
                    p.add_(before, alpha=-0.1)
                self.state[p]["before"] = p.grad


def test_an_optimizer_that_keeps_gradients(root: Path) -> None:  # noqa: F811
    def new() -> Run:
        run = Plain(lambda p: Keeping(p, lr=0.1))
        run.in_place = False
        return run

    check_restored(root, new, recorded(root, new))


class Told(torch.optim.SGD):
    """Its step takes more than a closure, as Sophia's does."""

    def step(self, closure: Any = None, bs: int = 1) -> Any:  # type: ignore[override]
        return super().step(closure)


def with_main_grad(run: Run) -> None:
    p = run.model.first.weight
    p.main_grad, p.grad = torch.ones_like(p), None  # type: ignore[attr-defined]
    run.optim.step()


def with_graph(run: Run) -> None:
    run.optim.zero_grad()
    run.model(torch.randn(8, 6), 2).square().mean().backward(create_graph=True)
    run.optim.step()


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (lambda run: run.optim.step(bs=8), "'optim', whose step() is given 8"),
        (lambda run: run.optim.step(None, 8), "'optim', whose step() is given 8"),
        (with_main_grad, "first.weight: its gradient is in .main_grad"),
        (with_graph, "its gradient has a graph of its own"),
    ],
    ids=["named", "positional", "main_grad", "graph"],
)
def test_what_no_record_has_is_refused(
    root: Path,  # noqa: F811
    step: Callable[[Run], None],
    text: str,
) -> None:
    run = Plain(lambda p: Told(p, lr=0.1))
    with checkpointer(root, run) as ckpt:
        run.step(1)
        ckpt.step(1)
        with pytest.raises(UsageError, match=re.escape(text)):
            step(run)


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
def test_a_sharded_tensor_in_a_parameter_group_is_refused(lives: Lives) -> None:
    told = lives.live(nodes=[0, 0], case="tiers.records.watched_cases:centred_refused", grace_s=20)
    assert [one.status for one in told] == [0, 0], lives.errors()


@pytest.mark.distributed
@pytest.mark.soak_except("skipping")
@pytest.mark.parametrize("case", ["stages", "skipping"])
def test_a_step_that_one_rank_skips(lives: Lives, case: str) -> None:
    """Its kernel alone was told so by a scaler, or the script has left it out.  On another layout nobody
    could do that again."""
    told = lives.live(nodes=[0, 0], case=f"tiers.records.watched_cases:{case}_dies", grace_s=20)
    assert [one.status for one in told] == [-9, -9], lives.errors()
    told = lives.live(nodes=[0, 0], case=f"tiers.records.watched_cases:{case}_again")
    assert [one.status for one in told] == [0, 0], lives.errors()
    with pytest.raises(NotRecoverable, match="cannot be replayed on another layout"):
        replay_to(open_store(str(lives.place / "root")), STEPS)


@pytest.mark.distributed
@pytest.mark.soak_except("sparse")
@pytest.mark.parametrize("case", ["diverging", "sparse"])
def test_a_step_that_one_replica_skips(lives: Lives, case: str) -> None:
    """The replay ends before it: the other's gradients are not all recorded."""
    told = lives.live(nodes=[0, 0], case=f"tiers.records.watched_cases:{case}_dies", grace_s=20)
    assert [one.status for one in told] == [-9, -9], lives.errors()
    told = lives.live(nodes=[0, 0], case=f"tiers.records.watched_cases:{case}_again")
    assert [one.status for one in told] == [0, 0], lives.errors()


def test_one_optimizer_under_two_keys(root: Path) -> None:  # noqa: F811
    run = Plain()
    run.state["again"] = run.optim
    with pytest.raises(UsageError, match="in the state twice, as 'again' and 'optim'"):
        checkpointer(root, run)
