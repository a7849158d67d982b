"""A state that is looked at again and again: what lies where it did is taken as it was found, else anew."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import holdfast
from holdfast.live.collecting import collect
from holdfast.live.saving import saver
from holdfast.live.state.named import Collected, LiveTensor
from holdfast.live.state.placed import place


class Run:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.optim = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.state: dict[str, Any] = {"model": self.model, "optim": self.optim}
        self.train()

    @property
    def weight(self) -> nn.Parameter:
        return self.model[0].weight

    @property
    def moment(self) -> torch.Tensor:
        return self.optim.state[self.weight]["exp_avg"]

    def train(self) -> None:
        self.model(torch.randn(3, 4)).square().sum().backward()
        self.optim.step()


def replaced(run: Run) -> None:
    run.weight.data = torch.randn(4, 4)


def transposed(run: Run) -> None:
    """The same memory."""
    run.weight.data = run.weight.data.t()


def of_another_shape(run: Run) -> None:
    """The same memory."""
    run.weight.data = run.weight.data.view(2, 8)


def of_another_dtype(run: Run) -> None:
    """The same memory."""
    run.moment.data = run.moment.data.view(torch.int32)


def another_tensor(run: Run) -> None:
    """The same memory."""
    run.optim.state[run.weight]["exp_avg"] = run.moment.detach()


CHANGES = {
    "model.0.weight": (replaced, transposed, of_another_shape),
    "optim.0.weight.exp_avg": (of_another_dtype, another_tensor),
}


def described(one: LiveTensor) -> tuple[Any, ...]:
    local = one.placed.local
    return local.data_ptr(), local.shape, local.stride(), one.placed.dtype, one.placed.box


def test_nothing_is_placed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    before = collect(run.state).tensors
    run.train()
    monkeypatch.setattr("holdfast.live.state.named.place", None)
    monkeypatch.setattr("holdfast.live.state.optimizers.place", None)
    again = collect(run.state, before=before).tensors
    assert list(again) == list(before)
    assert all(again[name] is before[name] for name in before)


@pytest.mark.parametrize(
    ("name", "change"), [(n, change) for n, changes in CHANGES.items() for change in changes]
)
def test_what_has_moved_is(name: str, change: Callable[[Run], None]) -> None:
    run = Run()
    before = collect(run.state).tensors
    change(run)
    again = collect(run.state, before=before).tensors
    assert [n for n in before if again[n] is not before[n]] == [name]
    fresh = collect(run.state).tensors
    assert {n: described(t) for n, t in again.items()} == {
        n: described(t) for n, t in fresh.items()
    }
    assert again[name].source is fresh[name].source


def test_a_save_is_of_what_is_there_now(tmp_path: Path) -> None:
    run = Run()
    with holdfast.Checkpointer(tmp_path, run.state, on_error="raise") as ckpt:
        ckpt.save(1).wait()
        for step, change in ((2, replaced), (3, transposed), (4, another_tensor)):
            change(run)
            run.train()
            ckpt.save(step).wait()
            with holdfast.open(str(tmp_path), step=step) as saved:
                assert torch.equal(torch.from_numpy(saved.read("model.0.weight")), run.weight)
                found = torch.from_numpy(saved.read("optim.0.weight.exp_avg"))
                assert torch.equal(found, run.moment)


# -- under DTensor --------------------------------------------------------------------------------


def sharded(mesh: Any) -> dict[str, Any]:
    """A parameter, a state that is a DTensor, and one that is plain and lies as its parameter."""
    model = nn.Module()
    model.weight = nn.Parameter(DTensor.from_local(torch.randn(4, 4), mesh, [Shard(0)]))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    optim.state[model.weight] = {
        "cut": DTensor.from_local(torch.randn(4, 4), mesh, [Shard(0)]),
        "plain": torch.randn(4, 4),
    }
    return {"model": model, "optim": optim}


def test_dtensors_that_lie_otherwise_are_placed_anew(mesh: Any) -> None:
    """Also where the memory is the same."""
    state = sharded(mesh)
    before = collect(state).tensors
    again = collect(state, before=before).tensors
    assert all(again[name] is before[name] for name in ("model.weight", "optim.weight.cut"))
    p = state["model"].weight
    held = state["optim"].state[p]["cut"]
    held._spec = DTensor.from_local(held._local_tensor, mesh, [Replicate()])._spec
    again = collect(state, before=before).tensors
    assert again["optim.weight.cut"] is not before["optim.weight.cut"]
    assert again["optim.weight.cut"].placed.cuts == place(held, "").cuts
    assert again["optim.weight.plain"] is not before["optim.weight.plain"]
    p._local_tensor = p._local_tensor.data  # the same memory, with a counter of its own
    now = collect(state, before=again).tensors["model.weight"]
    assert now is not again["model.weight"]


def test_writes_to_a_local_part_are_counted(mesh: Any) -> None:
    """`p.to_local().clamp_()` between two steps: a snapshot that is being copied must not be torn."""
    state = sharded(mesh)
    p = state["model"].weight
    for name, written in (
        ("model.weight", p),
        ("optim.weight.cut", state["optim"].state[p]["cut"]),
    ):
        one = collect(state).tensors[name]
        before = one.version
        with torch.no_grad():
            written.to_local().add_(1)
        assert one.version > before
        before = one.version
        with torch.no_grad():
            written.add_(1)
        assert one.version > before
    one = collect(state).tensors["optim.weight.plain"]
    before = one.version
    state["optim"].state[p]["plain"].add_(1)
    assert one.version > before


def test_a_load_is_counted(mesh: Any, tmp_path: Path) -> None:
    """It fills memory past torch; who goes by version counters must know."""
    state = sharded(mesh)
    holdfast.save(tmp_path, state, step=1)
    tensors = collect(state).tensors
    before = {name: one.version for name, one in tensors.items()}
    local = state["model"].weight._local_tensor._version
    holdfast.load(tmp_path, state)
    assert all(one.version > before[name] for name, one in tensors.items())
    assert state["model"].weight._local_tensor._version > local


# -- what follows from it -------------------------------------------------------------------------


def test_nothing_that_is_copied_at_the_call_is_kept_alive(tmp_path: Path) -> None:
    """An object's `state_dict` may clone as much as a model."""

    class Average:
        def __init__(self) -> None:
            self.cloned: list[weakref.ref[torch.Tensor]] = []

        def state_dict(self) -> dict[str, torch.Tensor]:
            found = torch.zeros(100_000)
            self.cloned.append(weakref.ref(found))
            return {"average": found}

        def load_state_dict(self, state: object) -> None:
            raise NotImplementedError

    average = Average()
    state = Run().state | {"average": average}
    with holdfast.Checkpointer(tmp_path, state, on_error="raise") as ckpt:
        for step in (1, 2):
            ckpt.save(step).wait()
            assert average.cloned
            until = time.monotonic() + 120
            while any(one() is not None for one in average.cloned):
                assert time.monotonic() < until
                time.sleep(0.01)  # threads may be about to let go
                gc.collect()


def test_the_state_is_described_anew_when_it_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not if it does not."""
    described_at: list[int] = []
    step = 0

    def describe(live: Collected) -> bytes:
        described_at.append(step)
        return original(live)

    original = saver.describe_tensors
    monkeypatch.setattr(saver, "describe_tensors", describe)
    run = Run()
    run.state["own"] = torch.zeros(3)
    with holdfast.Checkpointer(tmp_path, run.state, on_error="raise") as ckpt:
        described_at.clear()
        for step in range(1, 8):
            match step:
                case 3:
                    run.state["own"] = torch.ones(3)  # lies alike
                case 4:
                    run.state["own"] = torch.zeros(4)
                case 5:
                    run.model.tied = run.weight
                case 6:
                    run.state.update({"model": run.state.pop("model")})  # another order of keys
            ckpt.save(step).wait()
            with holdfast.open(str(tmp_path), step=step) as saved:
                assert torch.equal(torch.from_numpy(saved.read("own")), run.state["own"])
    assert described_at == [1, 4, 5]
