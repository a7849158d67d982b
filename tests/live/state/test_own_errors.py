"""What a user's own object raises is told with the key by which the state names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import HoldfastError, UsageError


class Loader:
    """Fails in the calls that it is told to fail in."""

    def __init__(self, *failing: str, rule: str | None = None) -> None:
        self.failing = failing
        if rule is not None:
            self.on_resize = rule

    def state_dict(self) -> dict[str, Any]:
        if "state_dict" in self.failing:
            raise KeyError("at")
        return {"at": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "load_state_dict" in self.failing:
            raise RuntimeError("no such file")


class Layer(nn.Linear):
    def __init__(self, *failing: str) -> None:
        super().__init__(2, 2)
        self.failing = failing

    def get_extra_state(self) -> Any:
        if "get_extra_state" in self.failing:
            raise ValueError("not now")
        return {"amax": 1.0}

    def set_extra_state(self, state: Any) -> None:
        if "set_extra_state" in self.failing:
            raise ValueError("not now")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"loader": Loader("state_dict")}, "loader: state_dict() of Loader raised KeyError: 'at'"),
        (
            {"data": {"parts": [1, Loader("state_dict")]}},
            "data.parts[1]: state_dict() of Loader raised KeyError: 'at'",
        ),
        (
            {"model": nn.Sequential(Layer("get_extra_state"))},
            "model.0._extra_state: get_extra_state() of Layer raised ValueError: not now",
        ),
    ],
)
def test_at_a_save(tmp_path: Path, state: dict[str, Any], message: str) -> None:
    for save in (
        lambda: holdfast.save(tmp_path / "once", state, step=1),
        lambda: saved_by_a_run(tmp_path / "run", state),
    ):
        with pytest.raises(HoldfastError) as caught:
            save()
        assert message in str(caught.value)
        assert caught.value.__cause__ is not None or "rank" in str(caught.value)


def saved_by_a_run(root: Path, state: dict[str, Any]) -> None:
    with holdfast.Checkpointer(root, state) as ckpt:
        ckpt.save(1).wait(300)


def test_at_a_load(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"loader": Loader(), "model": Layer(), "x": torch.ones(1)}, step=1)
    with pytest.raises(HoldfastError) as caught:
        holdfast.load(tmp_path, {"loader": Loader("load_state_dict")})
    assert "loader: load_state_dict() of Loader raised RuntimeError: no such file" in str(
        caught.value
    )
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(HoldfastError) as caught:
        holdfast.load(tmp_path, {"model": Layer("set_extra_state")})
    assert "model._extra_state: set_extra_state() of Layer raised ValueError" in str(caught.value)


def test_a_mistake_that_holdfast_names_keeps_its_words(tmp_path: Path) -> None:
    class Odd(Loader):
        def state_dict(self) -> dict[str, Any]:
            return {"at": object()}

    with pytest.raises(UsageError, match=r"loader\.at: a builtins\.object cannot be saved"):
        holdfast.save(tmp_path, {"loader": Odd()}, step=1)


def test_an_empty_state(tmp_path: Path) -> None:
    for state, message in (({}, "state is an empty dict"), ([1], "must be a dict .* not list")):
        with pytest.raises(UsageError, match=message):
            holdfast.save(tmp_path, state, step=1)  # type: ignore[arg-type]
