"""A home behind the root on two ranks: one file each, one choice of all, and a rank that dies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from distributed.cases import Case, check, run_module
from distributed.homes_cases import CASES, SHAPE
from distributed.launch import launch
from holdfast.checkpoint.verifying import verify
from holdfast.store import LocalStore

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_module("homes_cases", 2, tmp_path_factory.mktemp("homes"), forked=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_on_two_ranks(failed: dict[str, list[str]], case: Case) -> None:
    check(failed, case.__name__)


def test_a_rank_that_dies_in_an_upload(tmp_path: Path) -> None:
    """The next run, on one rank, completes what two have begun."""
    assert launch("homes_cases", 2, tmp_path, "dies", forked=True).status != 0
    assert holdfast.steps(tmp_path / "behind") == [1]
    state = {"data": {"a": torch.zeros(SHAPE), "value": 0.0}}
    with holdfast.Checkpointer(tmp_path / "root", state, upload=tmp_path / "behind") as ckpt:
        assert ckpt.restore() == 2
    assert holdfast.steps(tmp_path / "behind") == [1, 2]
    assert verify(LocalStore(tmp_path / "behind"), 2).good
    assert (state["data"]["a"] == 2).all()
