"""What does not fit a restore, as the line that a user reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import HoldfastWarning, StateMismatch
from holdfast.live.restore.mismatches import Mismatch, Problems, differs


def test_each_kind_has_its_line() -> None:
    assert differs("net.w", "saved with shape (2,), here (3,)").text == (
        "net.w: saved with shape (2,), here (3,)"
    )
    assert Mismatch("missing", "net.w", " (did you mean 'net.v'?)").text == (
        "missing in the checkpoint: net.w (did you mean 'net.v'?)"
    )
    assert Mismatch("said", "m.engine", "m.engine.grad_scaler: {saved} without").text == (
        "m.engine.grad_scaler: {saved} without"
    )
    assert Mismatch("pattern", "a{b}*", "why").text.startswith("only='a{b}*' matches no tensor")


def test_what_another_mismatch_says_is_said_once() -> None:
    problems = Problems([differs("w", "x"), differs("w.scale", "y")], missing=["w.zero", "v"])
    problems.forget(["w.scale", "w.zero"])
    assert [one.name for one in problems.found] == ["w"] and problems.missing == ["v"]


class Counter:
    def __init__(self) -> None:
        self.n = 0

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state["n"]


def test_states_of_objects_that_are_not_here(tmp_path: Path) -> None:
    """Refused with what is here; told as unexpected by a load that is not strict."""
    holdfast.save(tmp_path, {"w": torch.zeros(2), "list": [Counter()]}, step=1)
    line = "the state of an object was saved, and here is a int"
    with pytest.raises(StateMismatch) as refused:
        holdfast.load(tmp_path, {"w": torch.zeros(2), "list": [0]})
    assert refused.value.problems == (f"list.[0]: {line}",)
    state = {"w": torch.zeros(2), "list": [0]}
    told = rf"unexpected in the checkpoint: list\.\[0\]: {line}; its values are put there$"
    with pytest.warns(HoldfastWarning, match=told):
        holdfast.load(tmp_path, state, strict=False)
    assert state["list"] == [{"n": 0}]
