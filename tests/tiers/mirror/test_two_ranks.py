"""A home behind the root on two ranks: one file each, one choice of all, and a rank that dies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.core.checkpoint.verifying import verify
from holdfast.store import LocalStore
from system.distributed.cases import Case, check, run_module
from system.distributed.homes_cases import CASES, SHAPE
from system.distributed.launch import launch

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_module("homes_cases", 2, tmp_path_factory.mktemp("homes"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_on_two_ranks(failed: dict[str, list[str]], case: Case) -> None:
    check(failed, case.__name__)


def test_a_rank_that_dies_in_an_upload(tmp_path: Path) -> None:
    """The next run, on one rank, completes what two have begun."""
    assert launch("homes_cases", 2, tmp_path, "dies").status != 0
    assert holdfast.steps(tmp_path / "behind") == [1]
    state = {"data": {"a": torch.zeros(SHAPE), "value": 0.0}}
    with holdfast.Checkpointer(tmp_path / "root", state, upload=tmp_path / "behind") as ckpt:
        assert ckpt.restore() == 2
    assert holdfast.steps(tmp_path / "behind") == [1, 2]
    assert verify(LocalStore(tmp_path / "behind"), 2).good
    assert (state["data"]["a"] == 2).all()


def told(out: Path, what: str) -> list[list[Any]]:
    """By rank, what `records_behind` has told under this name."""
    texts = [(out / f"told-{rank}.jsonl").read_text() for rank in (0, 1)]
    return [[d for d in map(json.loads, text.splitlines()) if what in d] for text in texts]


@pytest.mark.soak
def test_records_that_are_damaged_on_either_rank_are_read_behind(tmp_path: Path) -> None:
    """A header is read by one rank, and a record by whoever needs it: all take the copy."""
    one, other = tmp_path / "one", tmp_path / "other"
    homes = (tmp_path / "root", tmp_path / "behind")
    for out in (one, other):
        out.mkdir()
    launch("records_behind", 2, one, *homes, 14, 0.1).check()
    for step, rank, at in ((11, 0, 40), (12, 1, 0), (13, 0, 0), (13, 1, 0)):
        (path,) = homes[0].glob(f"log/*/{step:010d}-{step:010d}/r{rank:05d}.log")
        data = bytearray(path.read_bytes())
        data[at or len(data) // 2] ^= 1
        path.write_bytes(data)
    launch("records_behind", 2, other, *homes, 15, 0.1).check()
    for before, (began,) in zip(told(one, "step"), told(other, "restored")):
        assert (began["restored"], began["tier"], began["replayed"]) == (14, "durable", 4)
        assert began["digest"] == before[-1]["digest"]
    (first, second) = told(other, "warned")
    assert second == [] and len(first) == 1
    assert "are damaged or missing, and their copies in" in first[0]["warned"]
    assert "and 1 more" in first[0]["warned"]
