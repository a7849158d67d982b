"""Optimizers whose states are more than a tensor or a number each, by `dcp.save` and `dcp.load`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import holdfast
from capabilities import ALONE
from holdfast.dcp import Reader, Writer
from holdfast.errors import StateMismatch

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

T = torch.arange(3.0)


def lbfgs() -> dict[str, Any]:
    """Its list `al` has a tensor for each step that it remembers, and None for those to come."""
    model = nn.Linear(3, 2)
    optim = torch.optim.LBFGS(model.parameters(), history_size=3, max_iter=4)

    def loss() -> torch.Tensor:
        optim.zero_grad()
        found = model(torch.ones(2, 3)).square().mean()
        found.backward()
        return found

    optim.step(loss)
    optim.step(loss)
    assert {type(one) for one in optim.state_dict()["state"][0]["al"]} == {torch.Tensor, type(None)}
    return {"model": model.state_dict(), "optim": optim.state_dict()}


def of_adam(inside: Any = None, beside: Any = None) -> dict[str, Any]:
    """A model and its Adam by name, with more in the states of its parameters, or beside them."""
    model = nn.Linear(3, 2)
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optim.step()
    saved, names = optim.state_dict(), ("weight", "bias")
    states = {name: {**saved["state"][i], **(inside or {})} for i, name in enumerate(names)}
    groups = [{**saved["param_groups"][0], "params": list(names)}]
    own = {"state": states, "param_groups": groups, **(beside or {})}
    return {"model": model.state_dict(), "optim": own}


CASES = {
    "lbfgs": lbfgs(),
    "numbered": {"optim": {"state": {0: {"a": T}}, "param_groups": [{"params": [0]}], "extra": 3}},
    "bases": of_adam({"GG": [T, [], T + 1], "Q": None, "both": [T, T]}),
    "nested": of_adam({"d": {"x": T, "y": 2, "z": {}}, "n": [None, 2]}),
    "beside": of_adam(beside={"extra": 3, "more": {"t": T, "u": [1, "b"]}}),
    "under": {"app": of_adam({"GG": [T, None]}, {"extra": 3})},
}


def flat(value: Any) -> Any:
    """A value that can be compared; DCP makes text of all keys."""
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {str(key): flat(one) for key, one in value.items()}
    return [flat(one) for one in value] if isinstance(value, list) else value


def empty(value: Any) -> Any:
    """A state of the same form, with nothing in it."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: empty(one) for key, one in value.items()}
    return [empty(one) for one in value] if isinstance(value, list) else value


def without_empty(value: Any) -> Any:
    """A value without empty dicts, which DCP does not save."""
    if isinstance(value, dict):
        return {key: without_empty(one) for key, one in value.items() if one != {}}
    return value


@pytest.mark.parametrize("case", CASES)
def test_all_that_was_saved_is_loaded(tmp_path: Path, case: str) -> None:
    saved, ours, theirs = CASES[case], tmp_path / "ours", tmp_path / "theirs"
    dcp.save(saved, storage_writer=Writer(ours), **ALONE)
    dcp.save(saved, checkpoint_id=theirs, **ALONE)
    state, expected = empty(saved), empty(saved)
    dcp.load(state, storage_reader=Reader(ours), **ALONE)
    dcp.load(expected, checkpoint_id=theirs, **ALONE)
    assert repr(state) == repr(expected)  # a number is a number and a text there
    found: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(found, storage_reader=Reader(ours), planner=planner, no_dist=True)
    assert flat(found) == flat(without_empty(saved))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("state.weight.GG", {"inside": {"GG": [T, None]}}),
        ("state.weight.d.y", {"inside": {"d": {"y": 2}}}),
        ("extra", {"beside": {"extra": 3}}),
    ],
)
def test_a_live_optimizer_does_not_lose_it_without_a_word(
    tmp_path: Path, name: str, more: dict[str, Any]
) -> None:
    dcp.save(of_adam(**more), storage_writer=Writer(tmp_path), **ALONE)
    model = nn.Linear(3, 2)
    state = {"model": model, "optim": torch.optim.Adam(model.parameters())}
    with pytest.raises(StateMismatch, match=rf"unexpected in the checkpoint: optim\.{name}"):
        holdfast.load(tmp_path, state)
    with pytest.warns(holdfast.HoldfastWarning, match=rf"optim\.{name}"):
        holdfast.load(tmp_path, state, strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        holdfast.load(tmp_path, {"model": model})


@pytest.mark.parametrize("name", ["common", "engine"])
def test_a_name_of_holdfast_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        CheckpointException, match=rf"optim\.{name}: holdfast has values of its own"
    ):
        dcp.save(of_adam(beside={name: 3}), storage_writer=Writer(tmp_path), **ALONE)
