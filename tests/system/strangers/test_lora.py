"""LoRA by peft under `trainable_only`: base weights are not written, and a resumed run is bit-equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast import Checkpointer, Delta, Every, HoldfastWarning
from system.distributed.launch import launch
from tiers.memory.agents import stop

pytestmark = pytest.mark.soak
RECORDS = {"every": Every(durable=4, delta=1), "delta": Delta(batch=1)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x + self.down(torch.relu(self.up(x))))


def build(seed: int) -> Any:
    """A model with adapters: the base as it was trained before, the adapters anew."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = Net()
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
    return holdfast.trainable_only(peft.get_peft_model(base, config))


def train(root: Path, until: int, seed: int, losses: list[str], wrap: Any, **options: Any) -> Any:
    model = build(seed)
    live = wrap(model)
    optimizer = torch.optim.AdamW([p for p in live.parameters() if p.requires_grad], lr=0.01)
    state = {"model": live, "optim": optimizer}
    with Checkpointer(root, state, **{"every": 1, **options}) as ckpt:
        for step in range(int(ckpt.restore()) + 1, until + 1):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            loss = live(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(repr(loss.item()))
            ckpt.step(step)
    return model


def resumed_is_whole(root: Path, wrap: Any, **options: Any) -> None:
    whole: list[str] = []
    train(root / "whole", 9, 1, whole, wrap, **options)
    losses: list[str] = []
    train(root / "run", 6, 1, losses, wrap, **options)
    train(root / "run", 9, 2, losses, wrap, **options)  # adapters that begin otherwise
    assert losses == whole
    with holdfast.open(root / "run") as c:
        assert not [t.name for t in c.manifest.tensors if "lora_" not in t.name]
        assert len(c.left_out) == 4 and all("base_layer" in name for name in c.left_out)
        names = [t.name for t in c.manifest.tensors if t.state == "param"]
        assert "model.base_model.model.up.lora_A.default.weight" in names


@pytest.mark.parametrize("options", [{}, RECORDS], ids=["saved", "replayed"])
@pytest.mark.parametrize("wrap", [lambda m: m, torch.compile], ids=["plain", "compiled"])
def test_a_resumed_run_is_bit_equal(tmp_path: Path, wrap: Any, options: dict[str, Any]) -> None:
    if wrap is torch.compile:
        wrap = lambda m: torch.compile(m, backend="eager")  # noqa: E731
    with pytest.warns(HoldfastWarning, match="leaves out 4 of 8 parameters"):
        resumed_is_whole(tmp_path, wrap, **options)


def test_a_fresh_model_is_loaded_into(tmp_path: Path) -> None:
    losses: list[str] = []
    with pytest.warns(HoldfastWarning, match="leaves out"):
        trained = train(tmp_path, 3, 1, losses, lambda m: m)
    fresh = build(2)
    assert holdfast.load(tmp_path, {"model": fresh}) == 3
    for (name, a), b in zip(trained.state_dict().items(), fresh.state_dict().values()):
        assert torch.equal(a, b), name


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_on_two_ranks(tmp_path: Path, layout: str) -> None:
    try:
        launch("system.strangers.lora_ranks", 2, tmp_path, layout, forked=False).check()
    finally:
        stop(tmp_path / "node")
