"""A module that was handed over, and of which nothing at all is saved, is told."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import HoldfastWarning


class Mean(nn.Module):
    """A metric as torchmetrics has them: its sum is a buffer only on request."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("sum", torch.ones(()), persistent=persistent)


def test_a_module_of_which_nothing_is_saved_is_told_once(tmp_path: Path) -> None:
    state = {"model": nn.Linear(2, 2), "mean": nn.Sequential(Mean(False))}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", HoldfastWarning)
        with holdfast.Checkpointer(tmp_path, state) as ckpt:
            ckpt.save(1).wait(300)
            ckpt.save(2).wait(300)
    texts = [str(one.message) for one in seen if one.category is HoldfastWarning]
    assert len(texts) == 1
    assert texts[0].startswith("'mean': nothing is saved of this Sequential")


@pytest.mark.parametrize(
    "module", [Mean(True), nn.MSELoss(), nn.Sequential(nn.ReLU()), nn.Linear(1, 1)]
)
def test_others_are_not(tmp_path: Path, module: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", HoldfastWarning)
        holdfast.save(tmp_path, {"model": nn.Linear(2, 2), "other": module}, step=1)


def test_a_module_whose_tensors_another_one_has_is_not(tmp_path: Path) -> None:
    mean = Mean(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", HoldfastWarning)
        holdfast.save(tmp_path, {"mean": mean, "also": nn.Sequential(mean)}, step=1)
