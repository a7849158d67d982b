"""What `restore` returns: the step, and how it was reached."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast import Delta, Every, HoldfastWarning, Restored
from holdfast.errors import UsageError


def state() -> dict[str, Any]:
    torch.manual_seed(3)
    model = nn.Linear(3, 2)
    return {"model": model, "optim": torch.optim.AdamW(model.parameters())}


def train(state: dict[str, Any]) -> None:
    state["model"](torch.ones(1, 3)).sum().backward()
    state["optim"].step()
    state["optim"].zero_grad()


def test_nothing_there_is_told_from_step_0(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, state()) as ckpt:
        restored = ckpt.restore()
        assert restored == 0 and not restored.found and restored.tier is None
        assert repr(restored) == "Restored(nothing)" and str(restored) == "0"
        ckpt.save(0).wait()
        restored = ckpt.restore()
        assert restored == 0 and restored.found and restored.tier == "durable"


def test_it_is_a_number_wherever_numbers_go(tmp_path: Path) -> None:
    restored = Restored(7, "memory", 2)
    assert f"{restored:04d} {restored}" == "0007 7" and json.dumps([restored]) == "[7]"
    assert type(restored + 1) is int and type(pickle.loads(pickle.dumps(restored))) is int
    assert repr(restored) == (
        "Restored(step=7, tier='memory', replayed=2, exactness='bit-exact', loaders=())"
    )
    progress = {"step": restored}
    holdfast.save(tmp_path, {"progress": progress}, step=restored)
    found: dict[str, Any] = {"progress": {"step": 0}}
    assert holdfast.load(tmp_path, found) == 7 and found["progress"] == {"step": 7}


class Loader:
    """A data loader: it gives data, and has a place in them."""

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_it_says_which_loaders_are_in_the_state(tmp_path: Path) -> None:
    live = {**state(), "layers": [nn.Linear(1, 1)], "data": Loader(), "more": {"a": [Loader()]}}
    with holdfast.Checkpointer(tmp_path, live) as ckpt:
        assert ckpt.restore().loaders == ()
        ckpt.save(1).wait()
        restored = ckpt.restore()
        assert restored.loaders == ("data", "more.a[0]") and "loaders=('data'" in repr(restored)
    with holdfast.Checkpointer(tmp_path, {"model": live["model"]}) as ckpt:
        assert ckpt.restore().loaders == ()


def test_it_says_how_many_steps_were_done_again(tmp_path: Path) -> None:
    live = state()
    every = Every(durable=10, delta=1)
    with holdfast.Checkpointer(tmp_path, live, every=every, delta=Delta()) as ckpt:
        ckpt.restore()
        for step in range(1, 6):
            train(live)
            ckpt.step(step)
        ckpt.wait()
    with holdfast.Checkpointer(tmp_path, state(), every=every, delta=Delta()) as ckpt:
        restored = ckpt.restore()
        assert (int(restored), restored.tier) == (5, "durable")
        assert restored.replayed == 4 and restored.exactness == "bit-exact"


def test_a_source_and_a_part_of_it(tmp_path: Path) -> None:
    given = state()
    holdfast.save(tmp_path / "given", given, step=12)
    live = state()
    with torch.no_grad():
        live["model"].weight.zero_()
        live["model"].bias.zero_()
    with holdfast.Checkpointer(tmp_path / "run", live) as ckpt:
        restored = ckpt.restore(source=tmp_path / "given", only="*.weight")
        assert restored == 12 and restored.tier == "source"
        assert torch.equal(live["model"].weight, given["model"].weight)
        assert not live["model"].bias.any()
        with pytest.raises(UsageError, match=r"only=.*source="):
            ckpt.restore(only="*.weight")


def test_digests_are_not_compared_if_the_user_says_so(tmp_path: Path) -> None:
    live = state()
    with holdfast.Checkpointer(tmp_path, live) as ckpt:
        ckpt.save(1).wait()
        (image,) = tmp_path.glob("steps/*/*/r00000.safetensors")
        data = bytearray(image.read_bytes())
        at = data.index(live["model"].weight.detach().numpy().tobytes())
        data[at] ^= 1
        image.write_bytes(data)
        with pytest.raises(holdfast.errors.NotRecoverable), pytest.warns(HoldfastWarning):
            ckpt.restore()
        assert ckpt.restore(verify=False) == 1


def test_a_step_that_will_never_save_says_so(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, state()) as ckpt:
        with pytest.warns(HoldfastWarning, match=r"step\(\) saves nothing.*every="):
            ckpt.step(1)
        ckpt.step(2)  # once
    with holdfast.Checkpointer(tmp_path, state(), every=2) as ckpt:
        ckpt.step(1)
        ckpt.step(2)
    assert holdfast.steps(tmp_path) == [2]
