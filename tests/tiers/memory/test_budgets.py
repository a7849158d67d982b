"""Jobs of one user share the agent of a node, and each has a budget of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import HoldfastWarning
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.client import Client
from tiers.memory.agents import stop

pytestmark = pytest.mark.slow

LARGE, SMALL = 400_000, 1_000
"""Numbers of a state, of 4 bytes each."""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Memory of a node of which the first training starts the agent."""
    place = tmp_path / "node"
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(place))
    yield place
    stop(place)


def job(root: Path, size: int, budget: str | None = None) -> holdfast.Checkpointer:
    return holdfast.Checkpointer(
        root,
        {"x": {"t": torch.zeros(size)}},
        every=holdfast.Every(memory=1),
        memory=holdfast.Memory("none", budget=budget),
        when_busy="queue",
    )


def snapshots(ckpt: holdfast.Checkpointer) -> list[str]:
    """Names of what became of two snapshots."""
    seen: list[holdfast.events.Event] = []
    with holdfast.events.listen(seen.append):
        for step in (1, 2):
            ckpt.step(step)
        ckpt.wait()
    ends = ("snapshot.committed", "snapshot.failed")
    return [e.name for e in seen if e.name in ends]


@pytest.mark.parametrize("other", [None, "8MB"])
def test_a_small_budget_bounds_its_own_job_alone(
    node: Path, tmp_path: Path, other: str | None
) -> None:
    """It starts the agent, and the second needs more than the first may have."""
    with job(tmp_path / "a", SMALL, "100kB") as first:
        assert snapshots(first) == ["snapshot.committed"] * 2
        with job(tmp_path / "b", LARGE, other) as second:
            assert snapshots(second) == ["snapshot.committed"] * 2
        assert snapshots(first) == ["snapshot.committed"] * 2


def test_a_job_does_not_get_beyond_its_own_budget(node: Path, tmp_path: Path) -> None:
    """Whoever was there before, and whatever that may have."""
    with job(tmp_path / "a", LARGE) as first:
        assert snapshots(first) == ["snapshot.committed"] * 2
        with (
            job(tmp_path / "b", LARGE, "100kB") as second,
            pytest.warns(HoldfastWarning, match="job's budget is 100000 bytes"),
        ):
            assert snapshots(second) == ["snapshot.failed"] * 2


def test_a_larger_budget_raises_that_of_all_jobs(node: Path, tmp_path: Path) -> None:
    client = Client(node)
    with job(tmp_path / "a", SMALL, "100kB"):
        default = client.ask(w.Status(), w.AgentReport).budget
        assert default > 1 << 20
        with job(tmp_path / "b", SMALL, str(2 * default)):
            assert client.ask(w.Status(), w.AgentReport).budget == 2 * default
