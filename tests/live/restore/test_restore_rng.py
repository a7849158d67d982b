"""`restore_rng`: a resumed run draws what the uninterrupted one does, though its loader drew anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast import Checkpointer, Delta, Every
from holdfast.errors import UsageError

EPOCHS, BATCHES = 2, 6
RECORDS = {"every": Every(durable=4, delta=1), "delta": Delta(batch=1)}


class Noisy(Dataset[torch.Tensor]):
    """Rows with noise, of the generator that is drawn from where it is made, or of one of each row's own:
    no loader restores the generators of its workers."""

    def __init__(self, *, own: bool = False) -> None:
        self.own = own

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index) if self.own else None
        return index / 10 + torch.rand(3, generator=generator)


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step_of(model: nn.Module, optim: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    loss = model(batch).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.item()


def plain_run(root: Path, until: int, losses: dict[int, float], **options: Any) -> None:
    """Data by torch's own loader: the epoch's order follows from its number; read batches are skipped."""
    model, optim = model_and_optimizer()
    progress = {"epoch": 0, "batch": 0}
    state = {"model": model, "optim": optim, "progress": progress}
    with Checkpointer(root, state, **{"every": 1, **options}) as ckpt:
        step = ckpt.restore()
        for epoch in range(progress["epoch"], EPOCHS):
            order = torch.Generator().manual_seed(epoch)
            sampler = torch.utils.data.RandomSampler(Noisy(), generator=order)
            batches = iter(DataLoader(Noisy(), 4, sampler=sampler))  # draws a base seed
            if progress["batch"]:
                for _ in range(progress["batch"]):
                    next(batches)
                ckpt.restore_rng()
            for batch in batches:
                if step == until:
                    return
                losses[step + 1] = step_of(model, optim, batch)
                step += 1
                progress["batch"] += 1
                if progress["batch"] == BATCHES:
                    progress.update(epoch=epoch + 1, batch=0)
                ckpt.step(step)


def stateful_run(root: Path, until: int, losses: dict[int, float], **options: Any) -> None:
    """Data by torchdata's loader, which goes on where it was, with workers."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    model, optim = model_and_optimizer()
    loader = StatefulDataLoader(Noisy(own=True), 4, shuffle=True, num_workers=2)
    progress = {"epoch": 0}
    state = {"model": model, "optim": optim, "loader": loader, "progress": progress}
    with Checkpointer(root, state, **{"every": 1, **options}) as ckpt:
        restored = ckpt.restore()
        step = int(restored)
        for epoch in range(progress["epoch"], EPOCHS):
            batches: Iterator[torch.Tensor] = iter(loader)
            if restored.found and epoch == progress["epoch"]:
                ckpt.restore_rng()
            for batch in batches:
                if step == until:
                    return
                losses[step + 1] = step_of(model, optim, batch)
                step += 1
                progress["epoch"] = epoch
                ckpt.step(step)


Run = Callable[..., None]
STATEFUL = pytest.param(stateful_run, marks=pytest.mark.soak)


@pytest.mark.parametrize("options", [{}, RECORDS], ids=["saved", "replayed"])
@pytest.mark.parametrize("run", [plain_run, STATEFUL])
def test_a_resumed_run_is_bit_equal(tmp_path: Path, run: Run, options: dict[str, Any]) -> None:
    whole: dict[int, float] = {}
    run(tmp_path / "whole", EPOCHS * BATCHES, whole, **options)
    assert len(whole) == EPOCHS * BATCHES
    losses: dict[int, float] = {}
    for until in (3, BATCHES, BATCHES + 5, EPOCHS * BATCHES):  # in an epoch, and between two
        run(tmp_path / "resumed", until, losses, **options)
    assert losses == whole


def test_it_is_refused_where_it_has_nothing_to_put_back(tmp_path: Path) -> None:
    model, _ = model_and_optimizer()
    with Checkpointer(tmp_path / "run", {"model": model}) as ckpt:
        with pytest.raises(UsageError, match="nothing was restored"):
            ckpt.restore_rng()
        ckpt.restore()
        with pytest.raises(UsageError, match="nothing was restored"):
            ckpt.restore_rng()
        ckpt.save(1).wait()
        ckpt.restore()
        drawn = torch.rand(2)
        ckpt.restore_rng()
        assert torch.equal(torch.rand(2), drawn)
    holdfast.save(tmp_path / "given", {"model": model}, step=7)
    with Checkpointer(tmp_path / "other", {"model": model}) as ckpt:
        assert ckpt.restore(source=tmp_path / "given", strict=False) == 7
        with pytest.raises(UsageError, match="generators are fresh: step 7"):
            ckpt.restore_rng()
    mine = Checkpointer(tmp_path / "mine", {"model": model, "rng": {"seed": 1}})
    with mine as ckpt, pytest.raises(UsageError, match="its own 'rng'"):
        ckpt.restore_rng()


class Generators:
    """Stands for `torch.cuda`, which has generators of devices."""

    def __init__(self) -> None:
        self.states = {0: torch.tensor([1]), 1: torch.tensor([2])}

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self.states[device.index]

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.states[device.index] = state


@pytest.mark.parametrize("used", [True, False], ids=["used before", "used later"])
def test_a_state_on_the_host_has_the_generator_of_the_device_that_computes(
    monkeypatch: pytest.MonkeyPatch, used: bool
) -> None:
    """As with FSDP2's CPUOffloadPolicy; the device may be used only after the restore."""
    device = Generators()
    monkeypatch.setattr(torch, "get_device_module", lambda kind: device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    rng = holdfast.Rng()
    rng.devices = []  # as found for a state on the host
    saved = rng.state_dict()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    device.states[1] = torch.tensor([9])
    rng.load_state_dict(saved)
    assert device.states == {0: torch.tensor([1]), 1: torch.tensor([2])}
