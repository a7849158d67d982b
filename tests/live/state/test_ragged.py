"""Plain tensors whose attributes say which parts of a whole they have (torch's CheckpointableTensor)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import LayoutError, UsageError
from holdfast.tiers.memory.feed import check_feedable


def ragged(
    local: torch.Tensor, whole: tuple[int, ...], *parts: tuple[Any, Any, Any]
) -> torch.Tensor:
    """Mark a tensor.  `parts`: first index in the whole, first index in `local`, and size, of each."""
    marked: Any = local
    marked.global_shape = whole
    marked.global_offsets = tuple(at for at, _, _ in parts)
    marked.local_offsets = tuple(start for _, start, _ in parts)
    marked.local_sizes = tuple(size for _, _, size in parts)
    return local


def experts(fill: float | None = None) -> torch.nn.Module:
    """A layer with a padded weight that has rows 3..5 and 0..3 of five, columns all but the padding."""
    torch.manual_seed(1)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.full((6, 4), float("nan")))
    with torch.no_grad():
        for rows in ((0, 2), (3, 6)):
            part = module.weight[rows[0] : rows[1], :3]
            part.copy_(torch.randn(part.shape) if fill is None else torch.full(part.shape, fill))
    ragged(module.weight, (5, 3), ((3, 0), (0, 0), (2, 3)), ((0, 0), (3, 0), (3, 3)))
    return module


def whole_of(weight: torch.Tensor) -> torch.Tensor:
    return torch.cat([weight[3:6, :3], weight[0:2, :3]])


def stepped(module: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(2):
        module.weight.grad = torch.ones_like(module.weight)
        optimizer.step()
    return optimizer


def test_parts_with_padding_are_saved_as_one_whole_tensor(tmp_path: Path) -> None:
    module = experts()
    optimizer = stepped(module)
    holdfast.save(tmp_path, {"model": module, "optim": optimizer}, step=1)
    saved = holdfast.open(tmp_path)
    assert saved.info("model.weight").shape == (5, 3)
    assert torch.equal(
        torch.from_numpy(saved.read("model.weight")), whole_of(module.weight.detach())
    )
    moment = optimizer.state[module.weight]["exp_avg"]
    assert torch.equal(torch.from_numpy(saved.read("optim.weight.exp_avg")), whole_of(moment))


@pytest.mark.parametrize("has_states", [True, False])
def test_they_are_restored_and_padding_stays(tmp_path: Path, has_states: bool) -> None:
    module = experts()
    optimizer = stepped(module)
    holdfast.save(tmp_path, {"model": module, "optim": optimizer}, step=1)
    other = experts(fill=7.0)
    again = stepped(other) if has_states else torch.optim.AdamW(other.parameters())
    holdfast.load(tmp_path, {"model": other, "optim": again})
    assert torch.equal(whole_of(other.weight.detach()), whole_of(module.weight.detach()))
    for state in ("exp_avg", "exp_avg_sq"):
        here, there = again.state[other.weight][state], optimizer.state[module.weight][state]
        assert here.shape == there.shape and torch.equal(whole_of(here), whole_of(there))
    assert other.weight.detach()[2].isnan().all() and other.weight.detach()[:, 3].isnan().all()


def test_a_whole_tensor_takes_them_and_gives_them(tmp_path: Path) -> None:
    module, plain = experts(), torch.nn.Module()
    plain.weight = torch.nn.Parameter(torch.zeros(5, 3))
    holdfast.save(tmp_path / "a", {"model": module}, step=1)
    holdfast.load(tmp_path / "a", {"model": plain})
    assert torch.equal(plain.weight.detach(), whole_of(module.weight.detach()))
    holdfast.save(tmp_path / "b", {"model": plain}, step=1)
    other = experts(fill=7.0)
    holdfast.load(tmp_path / "b", {"model": other})
    assert torch.equal(whole_of(other.weight.detach()), plain.weight.detach())


def test_they_may_be_plain_values(tmp_path: Path) -> None:
    table = ragged(torch.arange(4.0), (4,), ((2,), (0,), (2,)), ((0,), (2,), (2,)))
    holdfast.save(tmp_path, {"table": table}, step=1)
    assert holdfast.open(tmp_path).read("table").tolist() == [2.0, 3.0, 0.0, 1.0]
    other = ragged(torch.zeros(4), (4,), ((0,), (0,), (4,)))
    holdfast.load(tmp_path, {"table": other})
    assert other.tolist() == [2.0, 3.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([((0,), (0,), (3,))], "holes"),
        ([((0,), (0,), (3,)), ((2,), (0,), (2,))], "overlaps"),
        ([((0,), (0,), (2,)), ((0,), (2,), (2,))], "twice"),
        ([((2,), (0,), (3,))], "not inside"),
        ([((0,), (3,), (2,))], "not inside"),
        ([((0, 0), (0,), (2,))], "not inside"),
    ],
)
def test_what_cannot_be_is_refused(parts: list[Any], said: str, tmp_path: Path) -> None:
    table = ragged(torch.arange(4.0), (4,), *parts)
    with pytest.raises(LayoutError, match=f"(?s)table.*{said}"):
        holdfast.save(tmp_path, {"table": table}, step=1)
    assert holdfast.steps(tmp_path) == []


def test_records_hold_them(tmp_path: Path) -> None:
    module = experts()
    state = {"model": module, "optim": torch.optim.AdamW(module.parameters())}
    every = holdfast.Every(durable=10, delta=1)
    with holdfast.Checkpointer(
        tmp_path, state, every=every, delta=holdfast.Delta(), on_error="raise"
    ) as ckpt:
        ckpt.restore()
        for step in range(1, 6):
            module.weight.grad = torch.full_like(module.weight, float(step))
            state["optim"].step()
            ckpt.step(step)
    other = experts(fill=7.0)
    again = {"model": other, "optim": torch.optim.AdamW(other.parameters())}
    with holdfast.Checkpointer(
        tmp_path, again, every=every, delta=holdfast.Delta(), on_error="raise"
    ) as ckpt:
        found = ckpt.restore()
        assert found == 5, found
    assert torch.equal(whole_of(other.weight.detach()), whole_of(module.weight.detach()))


class Average:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.value = saved["value"]


@pytest.mark.parametrize("size", [4, 40_000])
def test_in_objects_they_are_refused(size: int, tmp_path: Path) -> None:
    value = ragged(torch.zeros(size), (size,), ((0,), (0,), (size,)))
    with pytest.raises(UsageError, match=r"average\.value: a tensor with global_offsets"):
        holdfast.save(tmp_path, {"average": Average(value)}, step=1)


def test_replicas_are_not_fed_from_their_gradients() -> None:
    module = experts()
    state = {"model": module, "optim": torch.optim.AdamW(module.parameters())}
    with pytest.raises(UsageError, match="holds some parts of a whole"):
        check_feedable(state)
