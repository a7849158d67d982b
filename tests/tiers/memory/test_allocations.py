"""After the first snapshots the training thread allocates nothing as large as a tensor for the next ones.

Torch's profiler tells of each allocation of torch on a thread, tracemalloc of those of Python and numpy.
"""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import holdfast
from holdfast.live.saving import SaveOperation
from holdfast.live.state import copy_timing, snapshot
from holdfast.live.state.carrying import CarriedCopies

WAIT_S = 120.0
TENSOR_BYTES = 64 << 10
"""The least that counts as a tensor; what the state has here is all larger, or a number."""
PYTHON_BYTES = 256 << 10
"""Of Python objects, for some thirty tensors: their names and places, and the extras."""


class Seen:
    """An object with a state of its own."""

    def __init__(self) -> None:
        self.counts = torch.zeros(300_000)

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts, "epoch": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts.copy_(state["counts"])


class Run:
    """A training whose optimizer allocates nothing itself.  Each step is saved."""

    def __init__(self, root: Path, **memory: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(256, 512), torch.nn.BatchNorm1d(512), torch.nn.Linear(512, 256)
        )
        self.model.register_buffer("table", torch.zeros(500_000))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.average = torch.zeros(400_000)
        state = {"model": self.model, "optim": self.optimizer, "ema": self.average, "seen": Seen()}
        self.ckpt = holdfast.Checkpointer(
            root, state, every=holdfast.Every(memory=1), memory=holdfast.Memory("none", **memory)
        )
        self.steps = 0

    def backward(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.model(torch.randn(16, 256)).square().mean().backward()
        self.average.add_(1)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.backward()
            self.optimizer.step()
            self.save()
            self.ckpt.wait(WAIT_S)

    def save(self) -> None:
        self.steps += 1
        self.ckpt.step(self.steps)


class Counted:
    """What a block allocated on this thread: sizes of torch's blocks, and the most of Python at a time."""

    def __init__(self) -> None:
        self.tensors: list[int] = []
        self.python_bytes = 0


@contextmanager
def counting() -> Iterator[Counted]:
    found = Counted()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        tracemalloc.start()
        try:
            yield found
            found.python_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    events = profiler.profiler.kineto_results.events()
    found.tensors = [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0]


@contextmanager
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The saving thread begins at the end of the block: until then only the training thread allocates."""
    original, go = SaveOperation.run, threading.Event()

    def later(*args: Any) -> None:
        assert go.wait(WAIT_S)
        original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(SaveOperation, "run", later)
        try:
            yield
        finally:
            go.set()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(tmp_path / "node"))
    return tmp_path / "root"


def check(found: Counted) -> None:
    assert max(found.tensors, default=0) < TENSOR_BYTES, sorted(found.tensors)
    assert found.python_bytes < PYTHON_BYTES


def test_the_counting_sees_all_kinds() -> None:
    with counting() as found:
        torch.zeros(50_000)
        np.zeros(100_000)
    assert max(found.tensors) == 200_000
    assert 800_000 <= found.python_bytes < 900_000


@pytest.mark.parametrize("memory", [{}, {"carry": "32MB"}, {"feed": "gradient"}], ids=str)
def test_a_snapshot(root: Path, monkeypatch: pytest.MonkeyPatch, memory: dict[str, Any]) -> None:
    """Its call, and what the next optimizer step does for it."""
    run = Run(root, **memory)
    events: list[holdfast.events.Event] = []
    with run.ckpt, holdfast.events.listen(events.append):
        run.train(5)
        for _ in range(3):
            run.backward()
            with counting() as stepping:
                run.optimizer.step()
            with alone(monkeypatch), counting() as calling:
                run.save()
            run.ckpt.wait(WAIT_S)
            check(stepping)
            check(calling)
    assert calling.python_bytes > 10_000
    followed = [e for e in events if e.name == "feed.followed"]
    assert len(followed) == (5 if "feed" in memory else 0)


def test_what_is_carried_over(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training thread sets the rest aside in memory that is there."""
    monkeypatch.setattr(copy_timing, "COPIED_AT_CALL_BYTES", 0)
    run = Run(root, carry="32MB")
    original, go = np.copyto, threading.Event()

    def slowly(into: Any, source: Any) -> None:
        """The first copy goes on when the step waits; the rest is carried."""
        while not go.is_set() and not any(c._wanted for c in copies):
            time.sleep(0.01)
        go.set()
        original(into, source)

    copies: list[CarriedCopies] = []
    made = snapshot.Shot.carried

    def carried(*args: Any) -> CarriedCopies:
        copies.append(made(*args))
        return copies[-1]

    monkeypatch.setattr(snapshot.Shot, "carried", carried)
    events: list[holdfast.events.Event] = []
    with run.ckpt, holdfast.events.listen(events.append):
        run.train(2)
        run.backward()
        run.optimizer.step()
        monkeypatch.setattr(snapshot.np, "copyto", slowly)
        run.save()
        run.backward()
        with counting() as found:
            run.optimizer.step()
        check(found)
        run.ckpt.wait(WAIT_S)
    *_, waited = [e for e in events if e.name == "window.wait"]  # the first save is held
    assert waited.fields["carried"]
