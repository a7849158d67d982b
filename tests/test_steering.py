"""Frequencies that are tuned while a training runs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import events
from holdfast.errors import UsageError

pytestmark = pytest.mark.slow


class Training:
    def __init__(self, size: int = 64) -> None:
        self.model = torch.nn.Linear(size, size)
        self.optim = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = {"model": self.model, "optim": self.optim}

    def step(self) -> None:
        time.sleep(0.002)
        self.model(torch.randn(4, self.model.in_features)).square().mean().backward()
        self.optim.step()
        self.optim.zero_grad()


def train(root: Path, auto: Any, steps: int, **options: Any) -> list[events.Event]:
    """Events of the tuning."""
    told: list[events.Event] = []
    one = Training()
    with (
        events.listen(lambda e: told.append(e) if e.name == "retuned" else None),
        holdfast.Checkpointer(root, one.state, every=auto, **options) as ckpt,
    ):
        step = ckpt.restore()
        while step < steps:
            one.step()
            step += 1
            ckpt.step(step)
        train.every = ckpt.every  # type: ignore[attr-defined]
    return told


def test_costs_are_measured_and_change_the_frequencies(tmp_path: Path) -> None:
    """A failure every minute, at steps of a few milliseconds: saves pay as often as the overhead allows."""
    told = train(tmp_path, holdfast.Auto(mtbf_hours=1 / 60, overhead=0.5), 500)
    assert told, "nothing was tuned"
    first = told[0].fields
    assert first["knob"] == "durable"
    assert first["before"] == "durable 100"
    assert first["after"] != first["before"]
    assert "a failure every 0.0167 h (given)" in first["why"]


def test_it_is_never_above_the_overhead(tmp_path: Path) -> None:
    """Where a save takes a hundred steps, it is made less often, whatever fails."""
    told = train(tmp_path, holdfast.Auto(mtbf_hours=1 / 60, overhead=0.0001), 400)
    assert told
    assert "allowed" in told[0].fields["why"]
    assert train.every.durable > 100  # type: ignore[attr-defined]


def test_failures_are_counted_over_runs(tmp_path: Path) -> None:
    train(tmp_path, holdfast.Auto(), 120)
    first = json.loads((tmp_path / "tuning.json").read_text())
    assert first["process"] == 0
    assert first["trained_s"] > 0.2
    (claim,) = (tmp_path / "claims").iterdir()
    claim.write_text(claim.read_text().replace("closed", "0"))  # as if it had not come to that
    train(tmp_path, holdfast.Auto(), 150)
    second = json.loads((tmp_path / "tuning.json").read_text())
    assert second["process"] == 1
    assert second["trained_s"] > first["trained_s"]


def test_records_and_their_batches_are_tuned_too(tmp_path: Path) -> None:
    """Whatever is chosen, what is restored is what was trained."""
    one = Training()
    auto = holdfast.Auto(mtbf_hours=0.001, overhead=0.9)
    with holdfast.Checkpointer(tmp_path, one.state, every=auto, delta=holdfast.Delta()) as ckpt:
        for step in range(1, 231):
            one.step()
            ckpt.step(step)
        reached = one.model.weight.detach().clone()
        records = ckpt.every.delta
    again = Training()
    with holdfast.Checkpointer(tmp_path, again.state, delta=holdfast.Delta()) as ckpt:
        found = ckpt.restore()
    assert found <= 230
    if records:
        assert found == 230
        assert torch.equal(again.model.weight, reached)


def test_what_is_neither(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"must be holdfast\.Every"):
        holdfast.Checkpointer(tmp_path, Training().state, every=10)  # type: ignore[arg-type]
