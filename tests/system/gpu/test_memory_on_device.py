"""The memory tier and records with tensors on a device (`gpu.devices`); each case runs on the CPU, too."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.core.codec.stripes import copy, rs
from holdfast.live.state import copy_timing, devices, replicas, snapshot
from holdfast.live.state.carrying import CarriedCopies
from holdfast.live.state.devices import Moment, devices_in
from holdfast.live.state.replica_sampling import Sampler
from system.gpu.devices import DEVICE, occupy
from tiers.memory.agents import kill
from tiers.memory.test_replica_guard import Replicas, Stepping, trained

pytestmark = pytest.mark.slow
WAIT_S = 60.0


@pytest.fixture(params=["cpu", "device"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu":
        return "cpu"
    if not DEVICE:
        pytest.skip("no CUDA device here")
    return DEVICE


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(tmp_path / "node"))
    yield tmp_path
    if (tmp_path / "node" / "agent.json").exists():
        kill(tmp_path / "node")


@pytest.fixture
def one_rank(device: str) -> Iterator[None]:
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(300, 400), nn.BatchNorm1d(400)
        self.last = nn.Linear(400, 300)
        self.other = nn.Parameter(torch.randn(333, 77).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.last(torch.relu(self.norm(self.first(x))))
        return out.square().mean() + self.other.float().square().mean()


class Run:
    """A training on a device."""

    def __init__(self, folder: Path, device: str, *, sharded: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.device, self.step = device, 0
        self.model = Net(torch.float32 if sharded else torch.bfloat16).to(device)  # FSDP2 wants one
        if sharded:
            fully_shard(self.model, mesh=init_device_mesh(torch.device(device).type, (1,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        state = {"model": self.model, "optim": self.optimizer}
        self.ckpt = holdfast.Checkpointer(folder / "root", state, deadline_s=WAIT_S, **options)
        self.events: list[holdfast.events.Event] = []

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.step += 1
            torch.manual_seed(self.step)
            self.optimizer.zero_grad()
            self.model(torch.randn(16, 300).to(self.device)).backward()
            self.optimizer.step()

    def save(self) -> None:
        self.ckpt.step(self.step)
        self.ckpt.wait(WAIT_S)

    def values(self) -> dict[str, torch.Tensor]:
        found = dict(self.model.state_dict())
        for name, p in self.model.named_parameters():
            found |= {f"{name}.{key}": v for key, v in self.optimizer.state[p].items()}
        return {name: local(t).detach().cpu().clone() for name, t in found.items()}

    def restore(self) -> int:
        """What is kept, after all of it here was ruined."""
        with torch.no_grad():
            for tensor in self.model.state_dict().values():
                tensor.zero_()
        self.optimizer.state.clear()
        return self.ckpt.restore()

    def seen(self, name: str) -> list[Any]:
        return [e.fields for e in self.events if e.name == name]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def check(run: Run, expected: dict[str, torch.Tensor], off: float = 0.0) -> None:
    """The state is that again, where it was, and the training goes on."""
    found = run.values()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=off, atol=off, msg=name)
    assert {local(p).device for p in run.model.parameters()} == {torch.device(run.device)}
    run.train()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "FSDP2"])
def test_a_restart_finds_the_snapshot(folder: Path, device: str, sharded: bool) -> None:
    every, memory = holdfast.Every(memory=1), holdfast.Memory("none")
    if sharded and device.startswith("late"):
        pytest.skip("no backend of torch.distributed serves a simulated device")
    run = Run(folder, device, sharded=sharded, every=every, memory=memory)
    with run.ckpt:
        for _ in range(4):
            run.train()
            run.save()
        expected = run.values()
        run.train(2)
        before = holdfast.events.counters["memory.local.bytes"]
        assert run.restore() == 4
        assert holdfast.events.counters["memory.local.bytes"] > before
        check(run, expected)


def test_what_is_carried_over_is_of_the_moment(
    folder: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that follow at once do not wait for the copy, and change nothing of it."""
    monkeypatch.setattr(snapshot, "BATCH_BYTES", 100_000)
    monkeypatch.setattr(copy_timing, "COPIED_AT_CALL_BYTES", 0)
    memory = holdfast.Memory("none", carry="16MB")
    run = Run(folder, device, every=holdfast.Every(memory=1), memory=memory)
    with run.ckpt, holdfast.events.listen(run.events.append):
        run.train()
        run.save()
        run.train()
        expected = run.values()
        take, go = CarriedCopies.take, threading.Event()

        def slowly(self: CarriedCopies, number: int) -> torch.Tensor:
            found = take(self, number)
            time.sleep(0.05)
            assert not self.is_carried or go.wait(WAIT_S)
            return found

        monkeypatch.setattr(CarriedCopies, "take", slowly)
        run.ckpt.step(2)
        run.train(2)
        go.set()
        run.ckpt.wait(WAIT_S)
        waits = [f["carried"] for f in run.seen("window.wait")]
        assert waits[-2:] == [True, True]  # the first save is held until it is copied
        assert run.restore() == 2
        check(run, expected)


@torch.no_grad()
def come_late(tensors: list[torch.Tensor]) -> None:
    """Let the values of tensors be there only when the device has done something else first."""
    values = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    if not tensors[0].is_cpu:
        torch.accelerator.synchronize(tensors[0].device)
        occupy(0.3)
    for tensor, value in zip(tensors, values):
        tensor.copy_(value)


@pytest.mark.parametrize("make", [copy, rs])
def test_a_guard_is_made_from_the_replica(device: str, make: Any) -> None:
    """On a stream of its own, and from where its rest was set aside."""
    live, step = trained(device)
    replicas = Replicas(live, 3)
    stripes = replicas.stripes(make, 2)
    for me in range(3):
        expected = replicas.expected(stripes, me)
        kept = memoryview(bytearray(b"\xaa" * stripes.kept_bytes))
        guard = replicas.guard(stripes, me)
        come_late([t.placed.local for t in live.tensors.values()])
        ready = Moment(devices_in(live))
        guard.fill(kept, None, 0, ready)
        assert np.array_equal(kept, expected)
        kept[:] = bytes(len(kept))
        carried = Stepping(guard.sources, len(guard.sources) // 2, step)
        guard.fill(kept, carried, 0, ready)
        assert np.array_equal(kept, expected)
        replicas = Replicas(live, 3)  # a step further


@pytest.mark.parametrize("how", ["sample", "whole"])
def test_replicas_are_compared_as_they_were_at_the_call(device: str, how: str) -> None:
    """The values of another thread's streams are waited for."""

    def seen(*, late: bool) -> Any:
        live, _ = trained(device)
        placement = Replicas(live, 3).plan.placement
        local = [t.placed.local for t in live.tensors.values()]
        streams = [torch.Stream(torch.device(device))] if device != "cpu" else []
        with devices.on_streams(streams):  # a training's own
            if late:
                come_late(local)
            ready = Moment(devices_in(live))
        if how == "whole":
            return replicas._digests(live.tensors, {}, placement, 0, apart=False)
        sampler = Sampler()
        sampler.arrange(replicas.replicated(live.tensors, placement, 0, apart=False), live.tensors)
        return sampler.take(live.tensors, {}, ready)

    expected = seen(late=False)
    assert expected and (how == "whole" or expected[1])
    assert seen(late=True) == expected


def test_snapshots_from_gradients(folder: Path, device: str) -> None:
    """The replica on the host is as near as its manifest says; on the CPU, the state bit for bit."""
    memory = holdfast.Memory("none", feed="gradient")
    run = Run(folder, device, every=holdfast.Every(memory=1), memory=memory)
    with run.ckpt, holdfast.events.listen(run.events.append):
        for _ in range(7):
            run.train()
            run.save()
        assert [f["step"] for f in run.seen("feed.followed")] == [4, 5, 6, 7]
        assert device != "cpu" or not run.seen("feed.drift")
        expected = run.values()
        run.train()
        if device == "cpu":
            assert run.restore() == 7
        else:
            with pytest.warns(holdfast.HoldfastWarning, match="numerically equal"):
                assert run.restore() == 7
        check(run, expected, 0.0 if device == "cpu" else 1e-3)


def test_records_of_every_step(folder: Path, device: str) -> None:
    """A restart does the recorded steps again, on the device, bit for bit."""
    every, delta = holdfast.Every(durable=4, delta=1), holdfast.Delta()
    run = Run(folder, device, every=every, delta=delta)
    with run.ckpt:
        for _ in range(7):
            run.train()
            run.save()
        expected = run.values()
        assert run.restore() == 7
        assert holdfast.steps(str(folder / "root"))[-1] == 4
        check(run, expected)
