"""States that are saved in another dtype than they live in: one word of their source decides it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import sources
from holdfast.errors import StateMismatch, UsageError

BFLOAT16 = torch.bfloat16


def rounding(self: sources.Source, p: torch.Tensor) -> sources.Master:
    """What `sources.Torch.master` would say."""
    return sources.Master(p, is_itself=True, stored={"momentum_buffer": BFLOAT16})


@pytest.fixture
def _rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.live.sources.Torch.master", rounding)


class Run:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(40, 40)
        self.optim = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state: dict[str, Any] = {"model": self.model, "optim": self.optim}

    def step(self) -> None:
        self.model(torch.randn(4, 40)).square().mean().backward()
        self.optim.step()
        self.optim.zero_grad()

    @property
    def momenta(self) -> list[torch.Tensor]:
        return [self.optim.state[p]["momentum_buffer"] for p in self.model.parameters()]


@pytest.mark.usefixtures("_rounded")
@pytest.mark.parametrize("steps", [0, 1], ids=["lacking", "present"])
def test_momentum_in_bfloat16(tmp_path: Path, steps: int) -> None:
    """The file has half of the bytes, the live state stays as it is, and a restore has it rounded."""
    run = Run()
    run.step()
    run.step()
    before = [m.clone() for m in run.momenta]
    with holdfast.Checkpointer(tmp_path, run.state, on_error="raise") as ckpt:
        ckpt.save(2)
        run.step()  # what was saved is of the call
        ckpt.wait()
    with holdfast.open(tmp_path) as saved:
        dtypes = {name: saved.info(name).dtype for name in saved.names()}
    assert dtypes["optim.weight.momentum_buffer"] == "bfloat16"
    assert dtypes["model.weight"] == "float32"
    again = Run()
    for _ in range(steps):
        again.step()
    with holdfast.Checkpointer(tmp_path, again.state) as ckpt:
        assert ckpt.restore() == 2
    assert [m.dtype for m in again.momenta] == [torch.float32] * 2
    for restored, was in zip(again.momenta, before):
        assert torch.equal(restored, was.to(BFLOAT16).float()) and not torch.equal(restored, was)


def test_a_run_that_does_not_know_of_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    run.step()
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.live.sources.Torch.master", rounding)
        holdfast.save(tmp_path, run.state, step=1)
    with pytest.raises(StateMismatch, match=r"momentum_buffer: saved as bfloat16, here float32"):
        holdfast.load(tmp_path, run.state)


@pytest.mark.usefixtures("_rounded")
@pytest.mark.parametrize("options", [{"delta": True}, {"memory": True}], ids=["delta", "memory"])
def test_what_goes_on_from_live_states_is_refused(tmp_path: Path, options: dict[str, bool]) -> None:
    """Records that lead on from a rounded base would lead elsewhere, and twins have states of their own."""
    given: dict[str, Any] = {"delta": holdfast.Delta()}
    if "memory" in options:
        given = {"memory": holdfast.Memory("none", feed="gradient")}
    with pytest.raises(UsageError, match="'momentum_buffer' of 'optim' is saved in another dtype"):
        holdfast.Checkpointer(tmp_path, Run().state, **given)
