"""Every tier, with a state on devices: a training goes on as on the CPU, bit for bit, from what each keeps.

What the training does between two saves is queued on the device, and late.  Its thread does not wait for
the device in `step()`, and no device is touched that the state is not on.
"""

from __future__ import annotations

import gc
import importlib
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.live.state import copy_timing, snapshot
from system.gpu.devices import DEVICE, needs_device, other_device
from tiers.memory.agents import kill

pytestmark = [pytest.mark.slow, needs_device]
WAIT_S = 60.0
STEPS = 7

OPTIONS: dict[str, dict[str, Any]] = {
    "durable": {"every": holdfast.Every(durable=1)},
    "memory": {"every": holdfast.Every(memory=1), "memory": holdfast.Memory("none")},
    "records": {"every": holdfast.Every(durable=4, delta=1), "delta": holdfast.Delta()},
    "granted": {
        "every": holdfast.Every(durable=4, delta=1),
        "delta": holdfast.Delta(device_bytes="1MB"),
    },
    "gradient": {
        "every": holdfast.Every(memory=1),
        "memory": holdfast.Memory("none", feed="gradient"),
    },
    "carry": {"every": holdfast.Every(memory=1), "memory": holdfast.Memory("none", carry="4MB")},
}


class Net(nn.Module):
    """Two halves, each on a device of its own."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(50)).to(first)
        self.second = nn.Sequential(nn.ReLU(), nn.Linear(50, 30)).to(second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).to(self.second[1].weight.device)).square().mean()


class Run:
    """A training on one device or two, on their default streams or on others."""

    def __init__(
        self, devices: tuple[str, str], seed: int = 0, *, set_to_none: bool = True
    ) -> None:
        torch.manual_seed(seed)
        self.devices, self.set_to_none, self.step = devices, set_to_none, 0
        self.model = Net(*devices)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state = {"model": self.model, "optim": self.optimizer}

    def train(self) -> None:
        self.step += 1
        x = torch.randn(16, 40, generator=torch.Generator().manual_seed(self.step))
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        self.model(x.to(self.devices[0])).backward()
        self.optimizer.step()

    def ruin(self) -> None:
        with torch.no_grad():
            for tensor in self.model.state_dict().values():
                tensor.zero_()
        self.optimizer.state.clear()

    def values(self) -> dict[str, torch.Tensor]:
        found = {n: t.cpu().clone() for n, t in self.model.state_dict().items()}
        for name, p in self.model.named_parameters():
            found |= {f"{name}.{k}": v.cpu().clone() for k, v in self.optimizer.state[p].items()}
        return found


@contextmanager
def side_streams(devices: tuple[str, str], on_the_side: bool) -> Iterator[None]:
    """A block in which the training's kernels go to streams of its own; autograd follows."""
    with ExitStack() as streams:
        for device in dict.fromkeys(d for d in reversed(devices) if on_the_side and d != "cpu"):
            stream = torch.Stream(torch.device(device))
            is_cuda = device.startswith("cuda")
            streams.enter_context(torch.cuda.stream(stream) if is_cuda else stream)
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(tmp_path / "node"))
    monkeypatch.setattr(
        copy_timing, "COPIED_AT_CALL_BYTES", 0
    )  # nothing is so small that it is set aside
    monkeypatch.setattr(snapshot, "BATCH_BYTES", 1000)  # batches of one device, where there are two
    gc.collect()
    if DEVICE.startswith("late"):
        late().forget()
    yield tmp_path
    if (tmp_path / "node" / "agent.json").exists():
        kill(tmp_path / "node")


def late() -> Any:
    """What the simulated device has noted."""
    return importlib.import_module("system.late.device").core


def on_cpu(steps: int) -> list[dict[str, torch.Tensor]]:
    run, found = Run(("cpu", "cpu")), []
    for _ in range(steps):
        run.train()
        found.append(run.values())
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    if DEVICE.startswith("cuda"):  # whose kernels round otherwise
        return
    unlike = [name for name in found if not torch.equal(found[name], expected[name])]
    assert not unlike


@pytest.mark.parametrize("stays", [False, True], ids=["anew", "stays"])
@pytest.mark.parametrize("on_the_side", [False, True], ids=["default", "side"])
@pytest.mark.parametrize("split", ["one", "two", "host"])
@pytest.mark.parametrize("tier", [*OPTIONS])
def test_goes_on_as_on_the_cpu(
    folder: Path, tier: str, split: str, on_the_side: bool, stays: bool
) -> None:
    second = {"one": lambda: DEVICE, "two": other_device, "host": lambda: "cpu"}[split]()
    devices = (DEVICE, second)
    expected = on_cpu(STEPS + 2)
    options = {"deadline_s": WAIT_S, "when_busy": "queue", "on_error": "raise", **OPTIONS[tier]}
    run = Run(devices, set_to_none=not stays)
    with side_streams(devices, on_the_side):  # noqa: SIM117
        with holdfast.Checkpointer(folder / "root", run.state, **options) as ckpt:
            ckpt.restore()
            for _ in range(STEPS):
                run.train()
                noted = len(late().waits()) if DEVICE.startswith("late") else 0
                ckpt.step(run.step)
            if DEVICE.startswith("late"):
                me = threading.get_native_id()
                held = [kind for kind, thread, _ in late().waits()[noted:] if thread == me]
                assert not held, "the training's thread waits for the device in step()"
            ckpt.wait(WAIT_S)
            if DEVICE.startswith("late"):
                used = {torch.device(device).index for device in devices}
                assert {device for device, _ in late().contexts()} <= used
            run.ruin()
            run.step = int(ckpt.restore())
            assert run.step == STEPS
            same(run.values(), expected[STEPS - 1])
            for _ in range(2):
                run.train()
                ckpt.step(run.step)
            same(run.values(), expected[STEPS + 1])
