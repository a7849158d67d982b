"""`trainable_only`: frozen parameters are neither written nor restored, and that is seen to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from cli.calling import call
from holdfast import Checkpointer, Delta, Every, HoldfastWarning
from holdfast.errors import StateMismatch, UsageError


class Net(nn.Module):
    """A frozen layer and a trained one, with a buffer each."""

    def __init__(self, wide: int = 4) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(wide, wide), nn.BatchNorm1d(wide, affine=False))
        self.adapter = nn.Linear(wide, 1, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.adapter(self.base(x)).square().mean()
        return out


def state(seed: int, *, marked: bool = True, **kind: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net(**kind)
    if marked:
        assert holdfast.trainable_only(model) is model
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1)}


def train(live: dict[str, Any], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    live["model"](torch.randn(8, 4, generator=generator)).backward()
    live["optim"].step()
    live["optim"].zero_grad()


def run(root: Path, live: dict[str, Any], until: int, **options: Any) -> None:
    with Checkpointer(root, live, **{"every": 1, **options}) as ckpt:
        for step in range(int(ckpt.restore()) + 1, until + 1):
            train(live, step)
            ckpt.step(step)


def names(root: Path) -> list[str]:
    return sorted(t.name for t in holdfast.open(root).manifest.tensors)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))


def resumed(live: dict[str, Any]) -> dict[str, Any]:
    """Another run's start: the frozen weights are those that training began with, the others are not."""
    new = state(9)
    new["model"].base[0].load_state_dict(live["model"].base[0].state_dict())
    return new


@pytest.mark.parametrize(
    "options",
    [{}, {"every": Every(durable=4, delta=1), "delta": Delta(batch=1)}],
    ids=["", "records"],
)
def test_a_resumed_run_is_bit_equal(tmp_path: Path, options: dict[str, Any]) -> None:
    live = state(1)
    with pytest.warns(HoldfastWarning, match="leaves out 2 of 3 parameters") as told:
        run(tmp_path, live, 6, **options)
    assert len(told) == 1
    new = resumed(live)
    with pytest.warns(HoldfastWarning, match="leaves out"):
        run(tmp_path, new, 9, **options)
    whole = resumed(live)
    whole["model"] = state(1)["model"]
    whole["optim"] = torch.optim.AdamW(whole["model"].parameters(), lr=0.1)
    for step in range(1, 10):
        train(whole, step)
    assert same(new["model"], whole["model"])
    inside = [
        "adapter.weight",
        "base.1.num_batches_tracked",
        "base.1.running_mean",
        "base.1.running_var",
    ]
    assert names(tmp_path)[:4] == [f"model.{name}" for name in inside]
    assert all(name.startswith("optim.adapter.weight.") for name in names(tmp_path)[4:])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    root = tmp_path / "saved"
    live = state(1)
    train(live, 1)
    with pytest.warns(HoldfastWarning, match="leaves out"):
        holdfast.save(root, live, step=1)
    return root


def test_the_step_lists_what_is_not_in_it(saved: Path, tmp_path: Path) -> None:
    with holdfast.open(saved) as c:
        assert c.left_out == {
            "model.base.0.weight": ("float32", (4, 4)),
            "model.base.0.bias": ("float32", (4,)),
        }
    shown = call("inspect", saved)[1]
    assert "leaves out" in shown and "2 frozen parameters of 20 elements" in shown
    with pytest.warns(HoldfastWarning, match=r"2 frozen parameters, model\.base\.0\.\w+ the first"):
        holdfast.convert(saved, tmp_path / "weights", to="torch")
    weights = torch.load(tmp_path / "weights")
    assert {*weights} == {n.removeprefix("model.") for n in names(saved) if n[0] == "m"}


def problems(root: Path, live: dict[str, Any], **options: Any) -> str:
    before = {name: p.clone() for name, p in live["model"].named_parameters()}
    with pytest.raises(StateMismatch) as caught:
        holdfast.load(root, live, **options)
    assert all(torch.equal(p, before[name]) for name, p in live["model"].named_parameters())
    return str(caught.value)


def test_a_model_that_is_not_marked_is_refused(saved: Path) -> None:
    text = problems(saved, state(2, marked=False))
    assert "model.base.0.weight: not saved, for it was frozen and left out" in text
    live = state(2, marked=False)
    with pytest.warns(HoldfastWarning, match=r"missing in the checkpoint: model\.base\.0\.weight"):
        holdfast.load(saved, live, strict=False)


def test_another_frozen_set_is_refused(saved: Path) -> None:
    live = state(2)
    live["model"].base[0].bias.requires_grad_(True)
    text = problems(saved, live)
    assert "model.base.0.bias: not saved" in text and "base.0.weight" not in text
    live = state(2)
    live["model"].adapter.requires_grad_(False)
    assert "model.adapter.weight: saved, and left out here" in problems(saved, live)


def test_other_shapes_and_dtypes_and_names_are_refused(saved: Path) -> None:
    live = {"model": state(2)["model"]}
    live["model"].base[0] = nn.Linear(4, 4, bias=False, dtype=torch.float64).requires_grad_(False)
    text = problems(saved, live)
    assert (
        "model.base.0.weight: left out as float32 (4, 4) when saved, and frozen as float64" in text
    )
    assert "left out when saved, and not in the live model: model.base.0.bias" in text
    live = {"model": state(2)["model"]}
    live["model"].more = nn.Linear(2, 2, bias=False).requires_grad_(False)
    assert "model.more.weight: missing in the checkpoint, which does not list it" in problems(
        saved, live
    )


def test_a_whole_step_is_not_half_loaded_into_a_marked_model(tmp_path: Path) -> None:
    holdfast.save(tmp_path, state(1, marked=False), step=1)
    assert "model.base.0.weight: saved, and left out here" in problems(tmp_path, state(2))


def test_frozen_weights_that_are_nowhere_are_refused(saved: Path) -> None:
    with torch.device("meta"):
        model = holdfast.trainable_only(Net())
    with pytest.raises(UsageError, match=r"'base\.0\.weight' is on the meta device"):
        holdfast.load(saved, {"model": model})


def test_wrappers_and_parts_and_ties(tmp_path: Path) -> None:
    model = Net()
    model.tied = nn.Linear(4, 4)
    model.tied.weight = model.base[0].weight
    model.tied.bias.requires_grad_(False)
    holdfast.trainable_only(model.base)  # a part: the tie is left out, what is elsewhere is not
    with pytest.warns(HoldfastWarning, match="leaves out 2 of"):
        holdfast.save(tmp_path / "part", {"model": torch.compile(model)}, step=1)
    assert "model.tied.bias" in names(tmp_path / "part")
    left = holdfast.open(tmp_path / "part").left_out
    assert {*left} == {"model.base.0.weight", "model.base.0.bias", "model.tied.weight"}
    assert not holdfast.open(tmp_path / "part").manifest.aliases
    holdfast.load(tmp_path / "part", {"model": model})


def test_a_replay_on_the_command_line_keeps_the_list(tmp_path: Path) -> None:
    live = state(1)
    options = {"every": Every(durable=4, delta=1), "delta": Delta(batch=1)}
    with pytest.warns(HoldfastWarning, match="leaves out"):
        run(tmp_path / "run", live, 3, **options)
    assert call("replay", tmp_path / "run", tmp_path / "full", "--to", 3)[0] == 0
    assert {*holdfast.open(tmp_path / "full").left_out} == {
        "model.base.0.weight",
        "model.base.0.bias",
    }
    new = resumed(live)
    assert holdfast.load(tmp_path / "full", new) == 3 and same(new["model"], live["model"])
