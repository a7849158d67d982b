"""Saving on three ranks, and stopping two that are told to."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

import holdfast

from .cases import Case, check, run_module
from .launch import launch
from .saving_cases import CASES

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_module("saving_cases", 3, tmp_path_factory.mktemp("saving"), forked=False)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_saving(failed: dict[str, list[str]], case: Case) -> None:
    check(failed, case.__name__)


def test_sigterm_on_one_rank_stops_all_at_one_saved_step(tmp_path: Path) -> None:
    launch("sigterm", 2, tmp_path).check()
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    assert found[0]["code"] == 128 + signal.SIGTERM
    assert 5 <= found[0]["step"] <= 7
    assert holdfast.steps(str(tmp_path / "run")) == [found[0]["step"]]
    weight = holdfast.open(str(tmp_path / "run")).read("model.weight")
    assert weight.tolist() == found[0]["weight"]
