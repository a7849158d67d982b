"""Conversion by several ranks: the same files as by one, each written once, errors told to all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.core.checkpoint.diffing import compare_checkpoints

from .launch import launch

pytestmark = [pytest.mark.distributed]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(8)))
    url = tmp_path_factory.mktemp("run")
    holdfast.save(url, {"model": model, "more": {"a": 1}}, step=4)
    return url


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    "forked", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["forked", "real"]
)
def test_ranks_share_the_files(source: Path, tmp_path: Path, forked: bool) -> None:
    options = ("--max-file", "400kB", "--json")
    ran = launch("converting", 3, source, tmp_path / "d", "--to", "dcp", *options, forked=forked)
    ran.check()
    holdfast.convert(source, tmp_path / "one", to="dcp", max_file_bytes=400_000)
    assert files(tmp_path / "d") == files(tmp_path / "one")
    told = [json.loads(text[text.index("{") :]) for text in ran.output.values() if "{" in text]
    assert [t["num_files"] for t in told] == [len(files(tmp_path / "d")) - 1]  # rank 0 alone


def test_one_commit_of_all(source: Path, tmp_path: Path) -> None:
    launch("converting", 2, source, tmp_path / "u", "--max-file", "400kB").check()
    assert compare_checkpoints(holdfast.open(source), holdfast.open(tmp_path / "u")).identical
    assert not (tmp_path / "u.partial").exists()


def test_an_error_ends_all(source: Path, tmp_path: Path) -> None:
    (tmp_path / "d.partial").mkdir()
    (tmp_path / "d.partial/mine").write_text("mine")
    ran = launch("converting", 2, source, tmp_path / "d", "--to", "dcp")
    assert ran.status not in (0, None)
    assert "in the way" in "".join(ran.output.values())
    assert (tmp_path / "d.partial/mine").read_text() == "mine"


def test_ranks_that_open_different_steps(source: Path, tmp_path: Path) -> None:
    """A training may commit one between their looks at what is the newest."""
    steps = tmp_path / "steps"
    for step in (1, 2):
        holdfast.save(steps, {"model": torch.nn.Linear(30, 30)}, step=step)
    ran = launch("converting_apart", 2, steps, tmp_path / "d")
    assert ran.status not in (0, None)
    told = "".join([ran.torchrun, *ran.output.values()])
    assert "rank 1 has opened step 2, and rank 0 step 1" in told
    assert not (tmp_path / "d").exists()
