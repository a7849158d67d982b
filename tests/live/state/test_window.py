"""The snapshot window: what is saved is the state at the call, whatever the training does next."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast.live.saving import blocking_saves
from holdfast.live.state import copy_timing, snapshot, window

WAIT_S = 120.0


class Net(nn.Module):
    """Buffers that change in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 200), nn.BatchNorm1d(200), nn.Linear(200, 3))
        self.register_buffer("seen", torch.zeros(100_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.body(x).square().mean()


class Run:
    def __init__(self, root: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.state = {"model": self.net, "optim": self.optimizer}
        self.ckpt = holdfast.Checkpointer(root, self.state, **options)

    def forward(self) -> None:
        self.optimizer.zero_grad()
        self.net(torch.randn(8, 64)).backward()

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.forward()
            self.optimizer.step()

    def copy(self) -> dict[str, np.ndarray[Any, Any]]:
        """All tensors now, under holdfast's names."""
        found = {f"model.{n}": t.numpy().copy() for n, t in self.net.state_dict().items()}
        for name, p in self.net.named_parameters():
            for key, value in self.optimizer.state[p].items():
                found[f"optim.{name}.{key}"] = value.numpy().copy()
        return found


@pytest.fixture(autouse=True)
def _in_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small states would be copied at the call."""
    monkeypatch.setattr(copy_timing, "COPIED_AT_CALL_BYTES", 0)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """After the first save, which is copied at the call."""
    run = Run(tmp_path)
    run.train()
    run.ckpt.save(0).wait(WAIT_S)
    run.train()
    yield run
    run.ckpt.close()


def saved(root: Path, step: int) -> dict[str, np.ndarray[Any, Any]]:
    with holdfast.open(str(root), step=step) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.names()}


def different(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if a[name].tobytes() != b[name].tobytes()]


@contextmanager
def around_copy(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[Callable[[], None]], None]
) -> Iterator[None]:
    """While open, the background copy is `act(copy)`."""
    original = snapshot.Copies.run
    with monkeypatch.context() as patch:
        patch.setattr(snapshot.Copies, "run", lambda *args: act(lambda: original(*args)))
        yield


def test_the_next_optimizer_step_waits_for_the_copy(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy begins when the optimizer stands before its step, and must not see what it does."""
    before = run.copy()
    standing, stepped = threading.Event(), threading.Event()

    def late(copy: Callable[[], None]) -> None:
        assert standing.wait(WAIT_S)
        assert not stepped.wait(0.3), "the optimizer did not wait"
        copy()

    with around_copy(monkeypatch, late):
        save = run.ckpt.save(1)
        run.forward()
        thread = threading.Thread(
            target=lambda: (standing.set(), run.optimizer.step(), stepped.set())
        )
        thread.start()
        save.wait(WAIT_S)
        thread.join(WAIT_S)
    assert stepped.is_set()
    assert different(saved(tmp_path, 1), before) == []
    assert "model.body.0.weight" in different(run.copy(), before)


def test_buffers_are_copied_before_the_next_forward_pass(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run.copy()
    forwarded = threading.Event()

    def late(copy: Callable[[], None]) -> None:
        assert forwarded.wait(WAIT_S)
        copy()

    with around_copy(monkeypatch, late):
        save = run.ckpt.save(1)
        run.forward()
        assert set(different(run.copy(), before)) >= {"model.seen", "model.body.1.running_mean"}
        forwarded.set()
        save.wait(WAIT_S)
    assert different(saved(tmp_path, 1), before) == []


def test_many_saves_beside_the_training(run: Run, tmp_path: Path) -> None:
    copies, saves = {}, []
    for step in range(1, 9):
        copies[step] = run.copy()
        saves.append(run.ckpt.save(step))
        run.train(1 + step % 3)
    for save in saves:
        save.wait(WAIT_S)
    for step, copy in copies.items():
        assert different(saved(tmp_path, step), copy) == []


def test_the_first_save_is_copied_before_its_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is known of the loop yet, which may write to anything."""
    run, copied = Run(tmp_path), threading.Event()
    run.train()

    def told(copy: Callable[[], None]) -> None:
        copy()
        copied.set()

    with run.ckpt, around_copy(monkeypatch, told):
        before, save = run.copy(), run.ckpt.save(1)
        assert copied.is_set()
        with torch.no_grad():
            run.net.body[0].weight.zero_()
        save.wait(WAIT_S)
    assert different(saved(tmp_path, 1), before) == []


def test_a_load_waits_for_the_copy(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is saved is what was there before other values were loaded."""
    run.ckpt.save(1).wait(WAIT_S)
    run.train()
    before = run.copy()

    def late(copy: Callable[[], None]) -> None:
        time.sleep(0.3)
        copy()

    with around_copy(monkeypatch, late):
        save = run.ckpt.save(2)
        holdfast.load(tmp_path, run.state, step=1)
        save.wait(WAIT_S)
    assert different(saved(tmp_path, 2), before) == []
    assert different(saved(tmp_path, 1), run.copy()) == []


def test_a_forked_child_waits_for_no_copy(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no thread that copies: neither its loads nor its steps must wait for one."""
    forked = threading.Event()

    def late(copy: Callable[[], None]) -> None:
        assert forked.wait(WAIT_S)
        copy()

    with around_copy(monkeypatch, late):
        save = run.ckpt.save(1)
        child = os.fork()
        if child == 0:
            window.wait_for_copies()
            run.optimizer.step()
            os._exit(0)
        until = time.monotonic() + 120
        while os.waitpid(child, os.WNOHANG) == (0, 0) and time.monotonic() < until:
            time.sleep(0.01)
        ended = time.monotonic() < until
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        forked.set()
        save.wait(WAIT_S)
    assert ended


def test_a_write_after_the_save_is_no_business_of_its(run: Run, tmp_path: Path) -> None:
    before = run.copy()
    run.ckpt.save(1).wait(WAIT_S)
    with torch.no_grad():
        run.net.body[0].weight.add_(1)
    assert different(saved(tmp_path, 1), before) == []


def test_weights_that_moved_are_followed(run: Run, tmp_path: Path) -> None:
    """New memory, other strides: the list of copies is made anew."""
    run.ckpt.save(1).wait(WAIT_S)
    net = run.net
    net.body[0].weight.data = torch.randn(200, 64)
    net.body[2].weight.data = torch.randn(200, 3).t()
    net.seen = torch.arange(100_000.0)
    run.ckpt.save(2).wait(WAIT_S)
    assert different(saved(tmp_path, 2), run.copy()) == []


def test_a_state_that_grows_is_planned_anew(run: Run, tmp_path: Path) -> None:
    run.ckpt.save(1).wait(WAIT_S)
    run.net.more = nn.Linear(300, 300)
    run.optimizer.add_param_group({"params": run.net.more.parameters(), "lr": 0.5})
    run.ckpt.save(2).wait(WAIT_S)
    assert different(saved(tmp_path, 2), run.copy()) == []
    assert len(saved(tmp_path, 2)) == len(saved(tmp_path, 1)) + 2
    del run.net.more
    run.optimizer.param_groups.pop()
    run.ckpt.save(3).wait(WAIT_S)
    assert different(saved(tmp_path, 3), run.copy()) == []


def replay(run: Run) -> None:
    """A step as a device's graph makes it: no hook is called, no write counted."""
    for p in run.net.parameters():
        p.data.add_(1)
        for value in run.optimizer.state[p].values():
            value.data.add_(1)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the tensors pass for those of a device, which has graphs."""
    monkeypatch.setattr(blocking_saves, "devices_in", lambda live: [torch.device("cpu")])


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("call", ["step", "save"])
def test_a_step_that_calls_no_hooks_comes_after_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """From the first save on: the steps with hooks were before the training came to the last step."""
    run = Run(tmp_path, every=3)
    run.train()
    returned = threading.Event()

    def late(copy: Callable[[], None]) -> None:
        assert not returned.wait(0.3), "the call did not wait"
        copy()

    with run.ckpt, around_copy(monkeypatch, late):
        for step in (1, 2, 3):
            before = run.copy()
            run.ckpt.save(step) if call == "save" and step == 3 else run.ckpt.step(step)
            replay(run)
        returned.set()
        run.ckpt.wait()
    assert different(saved(tmp_path, 3), before) == []


def test_nothing_waits_without_a_device_or_after_a_step_with_hooks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned = threading.Event()

    def late(copy: Callable[[], None]) -> None:
        assert returned.wait(WAIT_S), "the call waited"
        copy()

    run = Run(tmp_path)
    with run.ckpt as ckpt:
        ckpt.save(0).wait(WAIT_S)
        with around_copy(monkeypatch, late):
            ckpt.save(1)
            returned.set()
            ckpt.wait()
    monkeypatch.setattr(blocking_saves, "devices_in", lambda live: [torch.device("cpu")])
    run = Run(tmp_path, every=2, on_error="raise", anew=True)
    with run.ckpt as ckpt:
        run.train()
        ckpt.save(2).wait(WAIT_S)
        run.train()
        ckpt.step(3)
        returned.clear()
        with around_copy(monkeypatch, late):
            ckpt.save(3)
            returned.set()
            ckpt.wait()


@pytest.mark.usefixtures("on_device")
def test_saves_that_hold_up_training_are_told_once(tmp_path: Path) -> None:
    """Not of a step or two that a loss scaler skips."""
    run, told = Run(tmp_path, every=100), list[str]()
    for step in range(1, 20):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.train(step in (1, 4))
            run.ckpt.save(step).wait(WAIT_S)
            run.ckpt.step(step)
        told += [f"{step}: {one.message}" for one in caught]
    run.ckpt.close()
    assert len(told) == 1
    assert told[0].startswith("7: each of the last 3 saves held up training")


def test_the_gate_is_nothing_to_compile_anew(tmp_path: Path) -> None:
    from torch._dynamo.testing import CompileCounter

    run, counter = Run(tmp_path, every=100), CompileCounter()
    step = torch.compile(run.optimizer.step, backend=counter)
    run.optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
    for number in range(1, 13):
        run.ckpt.step(number)
        run.forward()
        step()
    run.ckpt.close()
    assert counter.frame_count == 1


def test_an_uncounted_write_behind_the_copy_of_what_is_looked_at_is_seen(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All elements of a weight are written once its first ones are copied."""
    weight = run.net.body[0].weight

    def act(copy: Callable[[], None]) -> None:
        copy()
        weight.data.mul_(0.5)

    with around_copy(monkeypatch, act):
        save = run.ckpt.save(1)
        with pytest.raises(holdfast.HoldfastError, match=r"model\.body\.0\.weight"):
            save.wait(WAIT_S)
    run.train()
    run.ckpt.save(2).wait(WAIT_S)
    assert not different(saved(tmp_path, 2), run.copy())


def test_all_that_is_being_written_is_named_once_the_script_rests() -> None:
    """A swap of weights writes one after the other."""
    one, looks = window.Window(1), iter([["a"], ["a", "b"]])
    found: list[list[str]] = []
    settling = threading.Thread(target=lambda: found.append(one.settle(lambda: next(looks), 60.0)))
    one.begin(None)
    settling.start()
    while next(iter([one._names])) != ["a"]:
        time.sleep(0.01)
    window.rest()
    settling.join(WAIT_S)
    assert found == [["a", "b"]]
