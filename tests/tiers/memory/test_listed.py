"""`holdfast ls` shows the snapshots of a root that the agent of this node holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from cli.calling import call, call_json
from tiers.memory.agents import agent

pytestmark = pytest.mark.slow


def test_snapshots_of_this_root_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(tmp_path / "node"))
    state = {"x": {"t": torch.zeros(1000)}}
    with (
        agent(tmp_path / "node"),
        holdfast.Checkpointer(
            tmp_path / "run",
            state,
            every=holdfast.Every(memory=1),
            memory=holdfast.Memory("none"),
            when_busy="queue",
        ) as ckpt,
    ):
        ckpt.save(4).wait()
        for step in (5, 6):
            ckpt.step(step)
        ckpt.wait()
        code, found = call_json("ls", tmp_path / "run")
        assert code == 0 and [s["step"] for s in found["steps"]] == [4]
        assert found["snapshots"][-1]["step"] == 6 and found["snapshots_problem"] is None
        assert found["snapshots"][-1]["num_tensors"] == 1
        out = call("ls", tmp_path / "run")[1]
        (row,) = [line.split() for line in out.split("In memory")[1].splitlines()[-1:]]
        assert row[0] == "6"
        assert call_json("ls", tmp_path / "other")[1]["snapshots"] == []
    assert "In memory" not in call("ls", tmp_path / "run")[1]
