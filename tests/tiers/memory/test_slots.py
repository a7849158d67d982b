"""The agent's memory as the training process maps it."""

import shutil
from pathlib import Path

import pytest
import torch

import holdfast
from tiers.memory.agents import agent, await_gone, pid_of

pytestmark = pytest.mark.slow


def mapped(node: Path) -> list[str]:
    """What of a node's memory this process has mapped that was deleted."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in maps if str(node) in line and line.endswith("(deleted)")]


def test_memory_of_an_agent_whose_directory_was_deleted_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor gives out files of the same names."""
    node = tmp_path / "node"
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(node))
    every, memory = holdfast.Every(memory=1), holdfast.Memory("none")
    state = {"x": {"t": torch.arange(100_000)}}
    with (
        agent(node),
        holdfast.Checkpointer(tmp_path / "root", state, every=every, memory=memory) as ckpt,
    ):
        for step in range(1, 7):
            ckpt.step(step)
            ckpt.wait()
            if step == 3:
                pid = pid_of(node)
                shutil.rmtree(node)
                await_gone(pid)
                assert len(mapped(node)) == 2
        assert mapped(node) == []
