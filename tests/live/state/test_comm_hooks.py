"""What communication hooks of DDP carry over from step to step is told, for no state_dict() has it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import holdfast
from holdfast.errors import HoldfastWarning


def model() -> DDP:
    return DDP(nn.Linear(8, 8))


def saved_quietly(path: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", HoldfastWarning)
        holdfast.save(path, state, step=1)


def test_a_hook_with_state_of_its_own_is_told(tmp_path: Path, mesh: Any) -> None:
    net = model()
    net.register_comm_hook(powerSGD_hook.PowerSGDState(None, 1), powerSGD_hook.powerSGD_hook)
    with pytest.warns(
        HoldfastWarning, match="'gen': .* powerSGD_hook keeps a PowerSGDState that is not"
    ):
        holdfast.save(tmp_path, {"gen": nn.Sequential(net)}, step=1)


def test_hooks_that_keep_nothing_are_not(tmp_path: Path, mesh: Any) -> None:
    net = model()
    net.register_comm_hook(None, default_hooks.allreduce_hook)
    saved_quietly(tmp_path, {"model": net})


class Exchange:
    """As the warning says: an object that has the state as an attribute, and can save it."""

    def __init__(self) -> None:
        self.kept = powerSGD_hook.PowerSGDState(None, 1)

    def state_dict(self) -> dict[str, Any]:
        return {"errors": dict(self.kept.error_dict), "iter": self.kept.iter}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept.error_dict, self.kept.iter = dict(state["errors"]), state["iter"]


def test_a_hook_whose_state_is_handed_over_is_not_told(tmp_path: Path, mesh: Any) -> None:
    net, exchange = model(), Exchange()
    net.register_comm_hook(exchange.kept, powerSGD_hook.powerSGD_hook)
    exchange.kept.error_dict[0], exchange.kept.iter = torch.ones(3), 5
    saved_quietly(tmp_path, {"model": net, "exchange": exchange})
    loaded = Exchange()
    holdfast.load(tmp_path, {"model": model(), "exchange": loaded})
    assert torch.equal(loaded.kept.error_dict[0], torch.ones(3))
    assert loaded.kept.iter == 5
