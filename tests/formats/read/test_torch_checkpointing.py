"""Reading what torch_checkpointing itself has saved, on one and two ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import NotFound
from system.distributed.launch import launch

pytest.importorskip("torch_checkpointing")
pytestmark = [pytest.mark.distributed, pytest.mark.soak]


@pytest.fixture(scope="module", params=["fsdp-1", "fsdp-2", "tp-2", "plain-1"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, ranks = request.param.split("-")
    out = tmp_path_factory.mktemp(request.param)
    launch("formats.read.torch_checkpointing_source", int(ranks), out, kind, forked=False).check()
    return out


def test_all_of_it_is_loaded(saved: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
    with_metadata = (saved / "saved" / "metadata.pkl").exists()
    path = str(saved / "saved") if with_metadata else f"torch_checkpointing:{saved / 'saved'}"
    found = holdfast.open(path)
    assert found.format == "torch_checkpointing"
    assert found.extras["epoch"] == 3
    assert found.extras["note"] == {"a": [1, (2, 3)]}
    holdfast.load(path, {"model": model, "optim": optimizer})
    expected = torch.load(saved / "expected.pt")
    for name, p in model.named_parameters():
        assert torch.equal(p, expected["model"][name])
        for state, value in expected["moments"][name].items():
            assert torch.equal(optimizer.state[p][state], value), (name, state)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_rank_is_missing(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "saved", tmp_path / "cut")
    files = sorted(tmp_path.glob("cut/model_*.pt"))
    if len(files) == 1:
        pytest.skip("of one rank")
    files[-1].unlink()
    with pytest.raises(NotFound, match=r"model_1\.pt|no file of rank 1 of item 'model'"):
        holdfast.open(tmp_path / "cut").read("model.0.weight")
