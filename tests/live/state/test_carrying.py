"""A copy that takes longer than the window is carried over the optimizer's step, and is of one moment."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.live.state import copy_timing, snapshot
from holdfast.live.state.carrying import CarriedCopies, CarryBuffer


def slow(seconds: float):
    """Copies that take so long each."""
    original = np.copyto

    def copyto(into, source):
        time.sleep(seconds)
        original(into, source)

    return copyto


def training(num_layers: int = 12):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(num_layers)])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 64)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("carry", ["1MB", "200kB"], ids=["all fits", "part fits"])
def test_a_snapshot_spreads_over_steps_and_is_not_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carry: str
) -> None:
    """Training goes on through two steps while the copy of the first is under way; it holds the first."""
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(tmp_path / "node"))
    monkeypatch.setattr(copy_timing, "COPIED_AT_CALL_BYTES", 0)
    model, optimizer = training()
    events = []
    with (
        holdfast.events.listen(events.append),
        holdfast.Checkpointer(
            tmp_path / "root",
            {"model": model, "optim": optimizer},
            memory=holdfast.Memory("none", carry=carry),
        ) as ckpt,
    ):
        step(model, optimizer)
        ckpt.save(1).wait(120)
        step(model, optimizer)
        expected = {f"model.{k}": v.clone() for k, v in model.state_dict().items()}
        for name, p in model.named_parameters():
            expected |= {f"optim.{name}.{k}": v.clone() for k, v in optimizer.state[p].items()}
        monkeypatch.setattr(snapshot.np, "copyto", slow(0.05))
        began = time.perf_counter()
        save = ckpt.save(2)
        step(model, optimizer)
        step(model, optimizer)
        stepped = time.perf_counter() - began
        assert not save.done()
        save.wait(120)
        copied = time.perf_counter() - began
        monkeypatch.undo()
        monkeypatch.setattr(copy_timing, "COPIED_AT_CALL_BYTES", 0)
        monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(tmp_path / "node"))
        with holdfast.open(str(tmp_path / "root"), step=2) as saved:
            assert set(saved.names()) == set(expected)
            for name, tensor in expected.items():
                assert torch.equal(torch.from_numpy(saved.read(name)), tensor), name
    carried = [e.fields["carried"] for e in events if e.name == "window.wait"]
    assert carried[-1] is True
    assert stepped < copied


def test_what_was_written_before_the_step_is_not_carried() -> None:
    """Then the copier finds out, as without carrying."""
    tensors = [torch.zeros(100) for _ in range(4)]
    carried = CarriedCopies(tensors, CarryBuffer(10_000), sound=lambda: False)
    carried.take(0)
    carried.done()
    assert not carried.carry()
    assert carried.take(1) is tensors[1]


def test_it_waits_for_the_copy_under_way_and_for_room() -> None:
    tensors = [torch.full((1000,), float(i)) for i in range(4)]
    carried = CarriedCopies(tensors, CarryBuffer(8_200), sound=lambda: True)
    carried.take(0)
    done = threading.Event()
    answers = []

    def train() -> None:
        answers.append(carried.carry())
        for t in tensors:
            t.add_(100)
        done.set()

    thread = threading.Thread(target=train)
    thread.start()
    assert not done.wait(0.05)  # one is being copied
    carried.done()
    assert not done.wait(0.05)  # three are left, two fit
    assert carried.take(1) is tensors[1]
    carried.done()
    assert done.wait(120) and answers == [True]
    assert [float(carried.take(i)[0]) for i in (2, 3)] == [2.0, 3.0]
    assert carried.close()


def test_a_batch_under_way_is_finished_first() -> None:
    """Several copies are given to a stream before one waits for them."""
    tensors = [torch.full((10,), float(i)) for i in range(4)]
    carried = CarriedCopies(tensors, CarryBuffer(10_000), sound=lambda: True)
    carried.take(0)
    thread = threading.Thread(target=carried.carry)
    thread.start()
    time.sleep(0.05)
    assert carried.take(1) is tensors[1]  # not held up: what it waits for is this batch
    carried.done()
    thread.join(120)
    assert carried.is_carried and carried.take(2) is not tensors[2]


def test_a_copy_that_fails_holds_up_nobody() -> None:
    """The training thread waits to carry while the copier dies in the middle of a copy."""
    tensors = [torch.zeros(10) for _ in range(2)]
    carried = CarriedCopies(tensors, CarryBuffer(10_000), sound=lambda: True)
    carried.take(0)
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(carried.carry()), daemon=True)
    thread.start()
    time.sleep(0.05)
    assert not carried.close()
    thread.join(120)
    assert answers == [False]


def taken(carried: CarriedCopies, number: int) -> list[torch.Tensor]:
    """What the copier gets, if it gets anything within a few seconds."""
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(carried.take(number)), daemon=True)
    thread.start()
    thread.join(120)
    return found


def test_room_that_cannot_be_had_holds_up_nobody() -> None:
    """Training waits for the copy, as without carrying, and the copier does not wait for training."""
    tensors = [torch.zeros(10) for _ in range(2)]
    room = CarryBuffer(1 << 60)
    events: list[holdfast.events.Event] = []
    with holdfast.events.listen(events.append):
        for _ in range(2):
            carried = CarriedCopies(tensors, room, sound=lambda: True)
            assert not carried.carry()
            assert taken(carried, 0)[0] is tensors[0]
    assert [e.name for e in events] == ["window.not_carried"]
    assert "memory" in events[0].fields["error"]


def test_an_error_while_the_rest_is_set_aside_holds_up_nobody() -> None:
    tensors = [torch.zeros(10) for _ in range(2)]

    def unsound() -> bool:
        raise ValueError("versions cannot be read")

    carried = CarriedCopies(tensors, CarryBuffer(10_000), sound=unsound)
    with pytest.raises(ValueError, match="cannot be read"):
        carried.carry()
    assert taken(carried, 0)[0] is tensors[0]


def test_a_snapshot_whose_copy_fails_lets_training_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(tmp_path / "node"))
    model, optimizer = training(2)
    step(model, optimizer)
    original = np.copyto

    def failing(into, source):
        time.sleep(0.3)
        raise RuntimeError("the device is gone")

    memory = holdfast.Memory("none", carry="1MB")
    state = {"model": model, "optim": optimizer}
    with holdfast.Checkpointer(tmp_path / "root", state, memory=memory) as ckpt:
        monkeypatch.setattr(snapshot.np, "copyto", failing)
        save = ckpt.save(1)
        trained = threading.Thread(target=step, args=(model, optimizer), daemon=True)
        trained.start()
        trained.join(120)
        assert not trained.is_alive()
        with pytest.raises(Exception, match="the device is gone"):
            save.wait(120)
        monkeypatch.setattr(snapshot.np, "copyto", original)
        ckpt.save(2).wait(120)
    assert holdfast.steps(str(tmp_path / "root")) == [2]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(0, 8), st.sampled_from(
    [torch.float32, torch.bfloat16, torch.int8, torch.float64]
))  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_what_is_carried_is_what_was(sizes: list[int], at: int, dtype: torch.dtype) -> None:
    """Whatever their sizes, and wherever the step comes: each copy gets the value of its moment."""
    tensors = [torch.arange(n).to(dtype) for n in sizes]
    expected = [t.clone() for t in tensors]
    carried = CarriedCopies(tensors, CarryBuffer(10_000), sound=lambda: True)
    got = []
    for i in range(len(tensors)):
        if i == at:
            assert carried.carry()
            for t in tensors:
                t.fill_(7)
        got.append(carried.take(i).clone())
        carried.done()
    assert all(torch.equal(a, b) for a, b in zip(got, expected))
