"""States of an optimizer that share memory are told at the first save; what lies side by side is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import HoldfastWarning

Begin = Callable[[dict[torch.Tensor, Any], list[torch.Tensor]], None]


class Given(torch.optim.Optimizer):
    """Its states are begun by a function."""

    def __init__(self, params: Any, begin: Begin) -> None:
        super().__init__(params, {})
        self.begin = begin

    def step(self, closure: Any = None) -> None:
        self.begin(self.state, [p for g in self.param_groups for p in g["params"]])


def under_two_names(state: dict[torch.Tensor, Any], params: list[torch.Tensor]) -> None:
    for p in params:
        state[p]["a"] = state[p]["b"] = torch.zeros_like(p)


def of_two_parameters(state: dict[torch.Tensor, Any], params: list[torch.Tensor]) -> None:
    step = torch.zeros(())
    for p in params:
        state[p]["step"] = step


def in_part(state: dict[torch.Tensor, Any], params: list[torch.Tensor]) -> None:
    flat = torch.zeros(20)
    for start, p in enumerate(params):
        state[p]["a"] = flat[start : start + p.numel()]


def inside_states(state: dict[torch.Tensor, Any], params: list[torch.Tensor]) -> None:
    for p in params:
        shared = torch.zeros_like(p)
        state[p]["factors"] = {"left": shared, "right": [torch.zeros(2), shared]}


def side_by_side(state: dict[torch.Tensor, Any], params: list[torch.Tensor]) -> None:
    """In one flat buffer, as columns of one tensor, empty, or the same number."""
    flat, columns, at = torch.zeros(20), torch.zeros(8, 2), 0
    for column, p in enumerate(params):
        state[p]["a"] = flat[at : at + p.numel()].view_as(p)
        state[p]["b"] = columns[:, column]
        state[p]["none"] = columns[:0]
        state[p]["number"] = 1.5
        at += p.numel()


def save(root: Path, optimizer: type[Any], *args: Any) -> None:
    model = nn.Linear(4, 2)
    made = optimizer(model.parameters(), *args)
    model(torch.ones(1, 4)).sum().backward()
    made.step()
    holdfast.save(root, {"model": model, "optim": made}, step=1)


@pytest.mark.parametrize(
    ("begin", "names"),
    [
        (under_two_names, "weight.a and weight.b, bias.a and bias.b"),
        (of_two_parameters, "weight.step and bias.step"),
        (in_part, "weight.a and bias.a"),
        (
            inside_states,
            r"weight.factors.left and weight.factors.right\[1\], bias.factors.left and .*",
        ),
    ],
)
def test_states_that_share_memory_are_told(tmp_path: Path, begin: Begin, names: str) -> None:
    with pytest.warns(HoldfastWarning, match=f"'optim': states of Given share memory: {names}\\. "):
        save(tmp_path, Given, begin)


def test_states_that_lie_side_by_side(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", HoldfastWarning)
        save(tmp_path, Given, side_by_side)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "ASGD", "NAdam", "RAdam", "Rprop"])
@pytest.mark.parametrize("foreach", [False, True])
def test_no_states_of_torch_do(tmp_path: Path, name: str, foreach: bool) -> None:
    kind = getattr(torch.optim, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error", HoldfastWarning)
        save(tmp_path, lambda params: kind(params, lr=0.1, foreach=foreach))  # type: ignore[arg-type]


def test_the_tables_of_bitsandbytes_are_no_states(tmp_path: Path) -> None:
    optim = pytest.importorskip("bitsandbytes.optim")
    model = nn.Linear(128, 128)
    made = optim.AdamW8bit(model.parameters(), min_8bit_size=1)
    model(torch.ones(1, 128)).sum().backward()
    made.step()
    tables = [made.state[p]["qmap1"].data_ptr() for p in model.parameters()]
    assert len(set(tables)) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", HoldfastWarning)
        holdfast.save(tmp_path, {"model": model, "optim": made}, step=1)
