"""A run that goes back to an older step: what it left is history, for restore and for prune."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.core.checkpoint.pruning import prune
from holdfast.store import open_store


def net(value: float) -> nn.Linear:
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, value)
    return model


def test_what_it_saves_then_is_the_newest(tmp_path: Path) -> None:
    model = net(0.0)
    with holdfast.Checkpointer(tmp_path, {"model": model}, keep=holdfast.Keep(last=2)) as ckpt:
        for step in (10, 20, 30):
            nn.init.constant_(model.weight, float(step))
            ckpt.save(step).wait()
        assert ckpt.restore(step=20) == 20
        nn.init.constant_(model.weight, 25.0)
        ckpt.save(25).wait()
    assert holdfast.steps(tmp_path) == [20, 25, 30]  # the last of which is not of its line any more
    assert prune(open_store(str(tmp_path)), holdfast.Keep(last=2)) == [20]
    assert holdfast.steps(tmp_path) == [25, 30]
    other = net(0.0)
    with holdfast.Checkpointer(tmp_path, {"model": other}) as ckpt:
        assert ckpt.restore() == 25
    assert torch.equal(other.weight, torch.full((4, 4), 25.0))


def test_so_it_is_after_a_damaged_step_was_passed_over(tmp_path: Path) -> None:
    model = net(1.0)
    with holdfast.Checkpointer(tmp_path, {"model": model}) as ckpt:
        ckpt.save(10).wait()
        ckpt.save(20).wait()
    (file,) = (tmp_path / "steps" / "0000000020").rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[4096] ^= 1
    file.write_bytes(data)
    with holdfast.Checkpointer(tmp_path, {"model": model}) as ckpt:
        with pytest.warns(holdfast.HoldfastWarning, match="step 20 cannot be used"):
            assert ckpt.restore() == 10
        ckpt.save(15).wait()
        assert ckpt.restore() == 15


def test_restoring_the_newest_leaves_nothing_behind(tmp_path: Path) -> None:
    model = net(1.0)
    with holdfast.Checkpointer(tmp_path, {"model": model}) as ckpt:
        ckpt.save(10).wait()
        claim = ckpt._tiers.claim
        assert ckpt.restore() == 10
        assert ckpt._tiers.claim == claim


def test_two_checkpointers_in_one_training_step(tmp_path: Path) -> None:
    """Each has a hook before optimizer steps; none may break the other's."""
    model = net(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = holdfast.Checkpointer(tmp_path / "a", {"model": model})
    second = holdfast.Checkpointer(tmp_path / "b", {"model": model})
    for step in (1, 2, 3):
        saves = [first.save(step), second.save(step)]
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        for save in saves:
            save.wait()
    first.close()
    optimizer.step()
    second.close()
    optimizer.step()
    assert holdfast.steps(tmp_path / "a") == holdfast.steps(tmp_path / "b") == [1, 2, 3]


class Counting(torch.optim.SGD):
    """It keeps a number for each parameter that had a gradient."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["steps"] = 1 + self.state[p].get("steps", 0)
        return super().step(closure)


def test_states_that_the_older_step_had_not_are_gone(tmp_path: Path) -> None:
    """Numbers as well as tensors: the bias has its first gradient after the step that is gone back to."""
    model = net(1.0)
    optim = Counting(model.parameters(), lr=0.1)
    with holdfast.Checkpointer(tmp_path, {"model": model, "optim": optim}) as ckpt:
        for step in range(1, 5):
            model.bias.requires_grad_(step > 2)
            model(torch.ones(4)).sum().backward()
            optim.step()
            optim.zero_grad()
            ckpt.save(step).wait()
        assert optim.state[model.bias] == {"steps": 2}
        assert ckpt.restore(step=2) == 2
    assert dict(optim.state) == {model.weight: {"steps": 2}}
