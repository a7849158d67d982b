"""Twins beside a training that does not do what they expect: they are as it is, or are forgotten."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from holdfast.live.state.observer import HookOrder, Observer
from holdfast.tiers.memory.twin import ParamPart
from holdfast.tiers.memory.twins import Twins

LIMIT_S = 120.0


class Trained:
    """A model with twins that are current from mark 1 on."""

    def __init__(self, twins: Twins) -> None:
        self.twins = twins
        self.model = torch.nn.Linear(3, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.make()
        self.learn(1)

    def make(self) -> None:
        parts = [ParamPart(name, p) for name, p in self.model.named_parameters()]
        self.twins.make([(self.optimizer, parts)])

    def learn(self, number: int) -> None:
        self.twins.mark(number, lambda: self.twins.all[0].copy_weights())
        assert self.twins.learn(number, lambda: [[{}, {}]])
        self.twins.go_on(number)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(3)).sum().backward()

    def same(self) -> bool:
        mine = self.twins.all[0].weights
        return all(torch.equal(a, b) for a, b in zip(mine, self.model.parameters()))


@pytest.fixture
def trained() -> Iterator[Trained]:
    twins = Twins()
    yield Trained(twins)
    twins.close(LIMIT_S)
    assert not any(t.name == "holdfast-twins" for t in threading.enumerate())


def test_a_later_snapshot_that_is_left_out_does_not_end_the_wait_for_an_earlier(
    trained: Trained,
) -> None:
    twins = trained.twins
    twins.mark(2)
    assert twins.at(2, LIMIT_S)
    trained.backward()
    trained.optimizer.step()
    twins.mark(3)
    twins.go_on(3)
    time.sleep(0.1)  # their thread would go on
    assert twins.at(2, LIMIT_S)
    assert not trained.same()  # the step after mark 2 is not made
    twins.go_on(2)
    assert not twins.at(3, LIMIT_S)
    twins.mark(4)
    assert twins.at(4, LIMIT_S)
    assert trained.same()
    twins.go_on(4)


@pytest.mark.parametrize("what", ["make", "end"])
def test_other_twins_while_a_step_begins(trained: Trained, what: str) -> None:
    """torch would raise in the training, if its hooks were changed by another thread meanwhile."""
    hooks: list[int] = []
    trained.optimizer.register_step_pre_hook(lambda *_: hooks.append(1))
    trained.backward()
    failed: list[BaseException] = []

    def step() -> None:
        try:
            trained.optimizer.step()
        except BaseException as error:
            failed.append(error)

    with trained.twins._change:
        training = threading.Thread(target=step)
        training.start()
        training.join(0.2)  # it waits in the hook
        trained.make() if what == "make" else trained.twins.end("it cannot")
    training.join(LIMIT_S)
    assert not failed
    assert hooks == [1]


def test_a_step_that_raises(trained: Trained) -> None:
    """The twins were given what the training then did not do."""

    def refuse(*_: Any) -> None:
        raise ValueError("no")

    records = Observer(
        {"optim": trained.optimizer}, HookOrder.RECORDS, refuse, refuse
    )  # behind theirs
    trained.backward()
    with pytest.raises(ValueError, match="no"):
        trained.optimizer.step()
    records.close()
    trained.twins.mark(2)
    assert not trained.twins.current


def test_a_hook_that_changes_gradients_later(trained: Trained) -> None:
    def double(*_: Any) -> None:
        trained.model.weight.grad *= 2

    trained.optimizer.register_step_pre_hook(double)
    trained.backward()
    trained.optimizer.step()
    assert not trained.twins.current
    trained.learn(2)  # behind that hook from here on
    trained.backward()
    trained.optimizer.step()
    trained.twins.mark(3)
    assert trained.twins.at(3, LIMIT_S)
    assert trained.same()
    trained.twins.go_on(3)


def test_sparse_gradients_are_not_followed(trained: Trained) -> None:
    trained.backward()
    trained.model.weight.grad = trained.model.weight.grad.to_sparse()
    trained.optimizer.step()
    assert not trained.twins.current
