"""Subscribers are called for each step, in their order, whatever else is hooked on the optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.live.state.observer import (
    HookOrder,
    Observer,
    StepCall,
    before_every_step,
    calls_hooks,
    hooks_after,
    without_hooks_before,
)


class Training:
    """An optimizer, and a list of what was called in its steps."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)

    def note(self, what: str) -> Callable[..., None]:
        return lambda *_: self.called.append(what)

    def observe(self, order: HookOrder, text: str) -> Observer[str]:
        before, after = self.note(f"{text} before"), self.note(f"{text} after")
        return Observer({"optim": self.optimizer}, order, before, after)

    def step(self) -> list[str]:
        self.called.clear()
        self.optimizer.step()
        return self.called


@pytest.fixture
def training() -> Training:
    return Training()


def test_the_order_of_all_in_a_step(training: Training) -> None:
    """It is the one that the module draws, in whatever order they come."""
    optimizer, note = training.optimizer, training.note
    optimizer.register_step_pre_hook(note("clip"))
    optimizer.register_step_post_hook(note("mask"))
    training.observe(HookOrder.RECORDS, "records")
    optimizer.register_step_post_hook(note("late mask"))
    training.observe(HookOrder.TWINS, "twins")
    window = before_every_step(lambda: training.called.append("window"))
    assert training.step() == [
        "window",
        "clip",
        "twins before",
        "records before",
        "twins after",
        "mask",
        "records after",
        "late mask",
    ]
    window.remove()
    assert "window" not in training.step()


def test_a_hook_that_comes_later(training: Training) -> None:
    """It is seen in the step; from the next time on ours are behind it."""
    twins, records = (training.observe(o, o.name) for o in (HookOrder.TWINS, HookOrder.RECORDS))
    other = training.observe(HookOrder.RECORDS, "of another checkpointer")
    assert twins.is_last("optim") and records.is_last("optim") and other.is_last("optim")
    training.optimizer.register_step_pre_hook(training.note("clip"))
    assert not twins.is_last("optim") and not records.is_last("optim")
    records.come_last()
    assert twins.is_last("optim") and records.is_last("optim") and other.is_last("optim")
    called = [what.removesuffix(" before") for what in training.step()]
    assert called[:4] == ["clip", "TWINS", "RECORDS", "of another checkpointer"]
    records.close()
    assert "RECORDS before" not in training.step()
    assert records.is_last("optim")  # there is nothing that it could miss


def test_steps_that_fail(training: Training) -> None:
    calls: list[StepCall[int]] = []
    observer = Observer(
        {7: training.optimizer}, HookOrder.RECORDS, calls.append, training.note("end")
    )

    def refuse() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        training.optimizer.step(refuse)  # type: ignore[arg-type]
    assert training.called == []
    assert calls[0].closure is refuse and calls[0].given == [refuse]
    training.optimizer.step()
    assert [(call.name, call.again, call.around) for call in calls] == [
        (7, False, None),
        (7, True, None),
    ]
    assert not observer.forget_failed()
    with pytest.raises(ValueError, match="no"):
        training.optimizer.step(refuse)  # type: ignore[arg-type]
    assert not observer.forget_failed(8)
    assert observer.forget_failed() and not observer.forget_failed()


def test_a_step_within_another(training: Training) -> None:
    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            training.optimizer.step()
            return super().step(closure)

    calls: list[StepCall[str]] = []
    outer = Outer([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizers = {"inner": training.optimizer, "outer": outer}
    Observer(optimizers, HookOrder.RECORDS, calls.append, lambda call: training.note(call.name)())
    outer.step()
    assert [(call.name, call.around) for call in calls] == [
        ("outer", None),
        ("inner", "outer"),
        ("outer", "outer"),
    ]
    assert training.called == ["inner", "outer", "outer"]


def test_a_forked_child_calls_nobody(training: Training) -> None:
    training.observe(HookOrder.RECORDS, "records")
    child = os.fork()
    if child == 0:
        os._exit(len(training.step()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert training.step() == ["records before", "records after"]


def test_hooks_of_others(training: Training) -> None:
    optimizer = training.optimizer
    training.observe(HookOrder.RECORDS, "records")
    assert hooks_after(optimizer) == 0
    optimizer.register_step_post_hook(training.note("mask"))
    optimizer.register_step_pre_hook(training.note("clip"))
    everywhere = register_optimizer_step_pre_hook(training.note("everywhere"))
    assert hooks_after(optimizer) == 1
    with without_hooks_before(optimizer):
        assert training.step() == ["mask"]
    assert training.step() == ["everywhere", "records before", "clip", "records after", "mask"]
    everywhere.remove()


def test_an_optimizer_that_torch_calls_no_hooks_for(training: Training) -> None:
    assert calls_hooks(training.optimizer)
    assert not calls_hooks(object.__new__(torch.optim.SGD))
