"""Objects that an Accelerator knows by number: in another order found by what they are, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import HoldfastWarning, StateMismatch

pytest.importorskip("accelerate")


class Split(Enum):
    TRAIN = 1
    VALID = 2


class Counter:
    """What is registered for checkpointing; `marks` are attributes that its state does not have."""

    def __init__(self, value: int, **marks: Any) -> None:
        self.value = value
        vars(self).update(marks)

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        self.value = saved["value"]


class Other(Counter):
    """Of another class."""


@pytest.fixture(autouse=True)
def no_word() -> Iterator[None]:
    """Nothing is told that a test does not expect."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", HoldfastWarning)
        yield


def attached(root: Path, *registered: Any, prepared: tuple[Any, ...] = ()) -> Any:
    from accelerate import Accelerator

    from holdfast.integrations.accelerate import attach

    accelerator = attach(Accelerator(cpu=True), root)
    accelerator.prepare(*(prepared or (nn.Linear(1, 1),)))
    if registered:
        accelerator.register_for_checkpointing(*registered)
    return accelerator


def saved_by(accelerator: Any, step: int = 1) -> None:
    accelerator.save_state(f"step_{step}")
    accelerator.end_training()


MARKS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"name": "train"}, {"name": "valid"}),
    ({"split": Split.TRAIN}, {"split": Split.VALID}),
    ({"name": "x", "kind": "a"}, {"name": "x", "kind": "b"}),
]


@pytest.mark.parametrize(("one", "other"), MARKS)
def test_marks_tell_objects_of_one_class_apart(one: Any, other: Any, tmp_path: Path) -> None:
    """In another order each gets its own back, and a later step has the order of that run."""
    saved_by(attached(tmp_path, Counter(1, **one), Counter(2, **other)))
    a, b = Counter(0, **one), Counter(0, **other)
    accelerator = attached(tmp_path, b, a)
    assert accelerator.load_state() == 1
    assert (a.value, b.value) == (1, 2)
    a.value, b.value = 3, 4
    saved_by(accelerator, 2)
    for objects in ((b, a), (a, b)):
        a.value = b.value = 0
        accelerator = attached(tmp_path, *objects)
        assert accelerator.load_state() == 2
        accelerator.end_training()
        assert (a.value, b.value) == (3, 4)


def test_objects_of_several_classes_are_told_apart_by_these(tmp_path: Path) -> None:
    saved_by(attached(tmp_path, Counter(1), Other(2)))
    a, b = Counter(0), Other(0)
    accelerator = attached(tmp_path, b, a)
    assert accelerator.load_state() == 1
    accelerator.end_training()
    assert (a.value, b.value) == (1, 2)


def test_an_object_is_told_apart_by_the_model_that_it_has(tmp_path: Path) -> None:
    """As an average of its weights has it."""

    def made(turned: bool) -> tuple[Any, Counter, Counter]:
        models = nn.Linear(1, 1), nn.Linear(2, 2)
        a, b = Counter(1, of=models[0]), Counter(2, of=models[1])
        return attached(tmp_path, *((b, a) if turned else (a, b)), prepared=models), a, b

    saved_by(made(False)[0])
    accelerator, a, b = made(True)
    a.value = b.value = 0
    assert accelerator.load_state() == 1
    accelerator.end_training()
    assert (a.value, b.value) == (1, 2)


def test_what_nothing_tells_apart_is_told_and_refused(tmp_path: Path) -> None:
    """Before anything is loaded; once they have names, that step is taken by number, and told."""
    with pytest.warns(HoldfastWarning, match=r"custom and custom_1 are Counter.*\[same-class\]"):
        saved_by(attached(tmp_path, Counter(1), Counter(2)))
    a, b = Counter(0), Counter(0)
    accelerator = attached(tmp_path, b, a)
    with pytest.raises(StateMismatch, match=r"custom and custom_1 are Counter.* cannot be proved"):
        accelerator.load_state()
    accelerator.end_training()
    assert (a.value, b.value) == (0, 0)
    a, b = Counter(0, name="a"), Counter(0, name="b")
    accelerator = attached(tmp_path, a, b)
    with pytest.warns(HoldfastWarning, match=r"they are taken in order \[same-class\]"):
        assert accelerator.load_state() == 1
    assert (a.value, b.value) == (1, 2)
    saved_by(accelerator, 2)


def pair(turned: bool) -> tuple[Any, ...]:
    """Two models of one class that their shapes tell apart, each with an optimizer and a scheduler."""
    models = [nn.Linear(3, 2), nn.Linear(2, 3)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1 + n) for n, o in enumerate(optimizers)]
    optimizers, schedulers = (
        (optimizers[::-1], schedulers[::-1]) if turned else (optimizers, schedulers)
    )
    return (*models, *optimizers, *schedulers)


def test_optimizers_and_schedulers_of_several_models(tmp_path: Path) -> None:
    """In the same order nothing is told; in another one it is refused."""
    saved_by(attached(tmp_path, prepared=pair(False)))
    accelerator = attached(tmp_path, prepared=pair(False))
    assert accelerator.load_state() == 1
    accelerator.end_training()
    accelerator = attached(tmp_path, prepared=pair(True))
    with pytest.raises(StateMismatch, match="optimizer and optimizer_1 come in another order"):
        accelerator.load_state()
    accelerator.end_training()


def test_models_that_are_alike_are_told_and_loaded(tmp_path: Path) -> None:
    """As twin critics are: they come in the order in which the script prepares them."""
    with pytest.warns(HoldfastWarning, match=r"model and model_1 are Linear.*\[same-class\]"):
        saved_by(attached(tmp_path, prepared=(nn.Linear(2, 2), nn.Linear(2, 2))))
    accelerator = attached(tmp_path, prepared=(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert accelerator.load_state() == 1
    accelerator.end_training()
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    one.name, other.name = "one", "other"
    accelerator = attached(tmp_path / "named", prepared=(one, other))
    saved_by(accelerator)
    accelerator = attached(tmp_path / "named", prepared=(other, one))
    with pytest.raises(StateMismatch, match="model and model_1 come in another order"):
        accelerator.load_state()
    accelerator.end_training()


def test_loaders_of_other_lengths_in_another_order_are_refused(tmp_path: Path) -> None:
    def loaders() -> list[Any]:
        data = (torch.utils.data.TensorDataset(torch.zeros(n)) for n in (6, 8))
        return [torch.utils.data.DataLoader(one, 2, shuffle=True) for one in data]

    saved_by(attached(tmp_path, prepared=(nn.Linear(1, 1), *loaders())))
    accelerator = attached(tmp_path, prepared=(nn.Linear(1, 1), *loaders()))
    assert accelerator.load_state() == 1
    accelerator.end_training()
    accelerator = attached(tmp_path, prepared=(nn.Linear(1, 1), *loaders()[::-1]))
    with pytest.raises(StateMismatch, match="loader and loader_1 come in another order"):
        accelerator.load_state()
    accelerator.end_training()


def test_a_text_that_training_changes_is_no_mark(tmp_path: Path) -> None:
    """It has other values at the next start, and says nothing of the order; the name does."""
    a, b = Counter(1, name="a", last="x"), Counter(2, name="b", last="y")
    accelerator = attached(tmp_path, a, b)
    saved_by(accelerator)
    c, d = Counter(0, name="a", last="y"), Counter(0, name="b", last="z")
    accelerator = attached(tmp_path, c, d)
    assert accelerator.load_state() == 1
    accelerator.end_training()
    assert (c.value, d.value) == (1, 2)


def test_a_step_is_restored_by_hand_too(tmp_path: Path) -> None:
    """By the Checkpointer that the accelerator has."""
    saved_by(attached(tmp_path, Counter(1, name="a"), Counter(2, name="b")))
    a, b = Counter(0, name="a"), Counter(0, name="b")
    accelerator = attached(tmp_path, b, a)
    assert accelerator.holdfast.restore() == 1
    assert (a.value, b.value) == (1, 2)
    accelerator.holdfast.save(3).wait()
    accelerator.end_training()
    a.value = b.value = 0
    accelerator = attached(tmp_path, a, b)
    assert accelerator.load_state() == 3
    accelerator.end_training()
    assert (a.value, b.value) == (1, 2)
