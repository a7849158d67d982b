"""What saves do beside a training on a device: which generators they have, which streams, which memory."""

from __future__ import annotations

import gc
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import HoldfastError, HoldfastWarning
from holdfast.live.state import copy_timing, devices, gradient_copies, graphs, snapshot
from holdfast.live.state.rng import Rng
from system.gpu.devices import DEVICE, needs_device, occupy, other_device

pytestmark = needs_device
WAIT_S = 60.0


def trained(width: int = 64) -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(width, width).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    return model, optimizer


def train(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, model.in_features, device=DEVICE)).square().mean().backward()
    optimizer.step()


def test_the_generators_are_those_of_the_devices_that_the_state_is_on(tmp_path: Path) -> None:
    """The script names its device, and has never made it the current one."""
    kind, other = torch.device(DEVICE).type, other_device()
    module = torch.get_device_module(kind)
    model, optimizer = trained()
    state = {"model": model, "optim": optimizer, "rng": Rng()}
    with holdfast.Checkpointer(tmp_path, state) as ckpt:
        drawn = module.get_rng_state(DEVICE)
        elsewhere = module.get_rng_state(other)
        ckpt.save(1).wait(WAIT_S)
        module.manual_seed_all(99)
        assert not torch.equal(module.get_rng_state(DEVICE), drawn)
        ckpt.restore()
        ckpt.restore_rng()
    assert torch.equal(module.get_rng_state(DEVICE), drawn)
    assert not torch.equal(module.get_rng_state(other), elsewhere)  # no tensor is there


def test_saves_take_no_stream_after_the_first(tmp_path: Path) -> None:
    """A stream of torch's pool may be one that NCCL has."""
    model, optimizer = trained()
    with holdfast.Checkpointer(tmp_path, {"model": model, "optim": optimizer}) as ckpt:
        ckpt.save(1).wait(WAIT_S)
        known = dict(devices._streams)
        for step in range(2, 6):
            train(model, optimizer)
            ckpt.save(step).wait(WAIT_S)
    assert devices._streams == known and known


class Refuses:
    """Locks no pages, as where a process may lock no more memory."""

    def lock(self, address: int, size: int) -> str:
        return "a limit"

    def unlock(self, address: int) -> None:
        raise AssertionError("nothing was locked")


def test_memory_that_cannot_be_locked_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(devices.page_locks, torch.device(DEVICE).type, Refuses())
    monkeypatch.setattr(copy_timing, "COPIED_AT_CALL_BYTES", 0)
    devices._tell_unlocked.cache_clear()
    model, optimizer = trained()
    expected = {}
    with pytest.warns(HoldfastWarning, match="not page-locked .a limit.") as told:  # noqa: PT031
        for root in (tmp_path / "a", tmp_path / "b"):
            with holdfast.Checkpointer(root, {"model": model, "optim": optimizer}) as ckpt:
                for step in (1, 2):
                    train(model, optimizer)
                    ckpt.save(step).wait(WAIT_S)
                    expected[root, step] = model.weight.detach().cpu()
    assert len([one for one in told if "page-locked" in str(one.message)]) == 1
    for (root, step), weight in expected.items():
        with holdfast.open(root, step=step) as checkpoint:
            assert torch.equal(torch.from_numpy(checkpoint.read("model.weight")), weight)


class Notes:
    """Notes what is locked."""

    def __init__(self) -> None:
        self.locked: list[int] = []

    def lock(self, address: int, size: int) -> str:
        self.locked.append(address)
        return ""

    def unlock(self, address: int) -> None:
        self.locked.remove(address)


def test_memory_is_unlocked_where_nobody_has_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes()
    monkeypatch.setitem(devices.page_locks, torch.device(DEVICE).type, notes)
    locked = devices.lock_pages(memoryview(bytearray(4096)), [torch.device(DEVICE)])
    assert locked is not None
    locked.wait()
    assert notes.locked
    del locked
    gc.collect()
    assert not notes.locked


def gradients_told_of(root: Path, grant: int | str, *, stays: bool) -> list[str]:
    """What is told of gradients that stay, in some recorded steps."""
    model, optimizer = trained()
    options = {"every": holdfast.Every(durable=20, delta=1), "on_error": "raise"}
    delta = holdfast.Delta(device_bytes=grant)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", HoldfastWarning)
        state = {"model": model, "optim": optimizer}
        with holdfast.Checkpointer(root, state, delta=delta, **options) as ckpt:
            for step in range(1, 10):
                optimizer.zero_grad(set_to_none=not stays)
                model(torch.ones(4, model.in_features, device=DEVICE)).square().mean().backward()
                optimizer.step()
                ckpt.step(step)
    return [str(one.message) for one in told if "gradients of optim stay" in str(one.message)]


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("grant", [0, "1MB"])
def test_gradients_that_a_device_has_to_wait_for_are_told(
    tmp_path: Path, stays: bool, grant: int | str
) -> None:
    texts = gradients_told_of(tmp_path, grant, stays=stays)
    assert len(texts) == (stays and not grant)
    assert all("Delta(device_bytes=16640)" in text for text in texts)


@pytest.mark.parametrize("why", ["graph", "room"])
def test_gradients_are_not_kept_where_that_is_not_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """A graph uses its memory again, whoever has tensors there; and a device may be full."""
    if why == "graph":
        monkeypatch.setattr(graphs, "_has_captured", True)
    else:
        monkeypatch.setattr(gradient_copies, "room_beside_peak", lambda _: 100.0)
    assert len(gradients_told_of(tmp_path, 0, stays=False)) == 1


def test_an_optimizer_that_writes_to_gradients_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are made anew for each step, and copied before such a step writes to them."""
    monkeypatch.setattr(graphs, "_has_captured", False)
    model, _ = trained()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True
    )
    train(model, optimizer)
    seen: list[str] = []
    memory = holdfast.Memory("none", feed="gradient")
    state = {"model": model, "optim": optimizer}
    with (
        holdfast.events.listen(lambda event: seen.append(event.name)),
        holdfast.Checkpointer(
            tmp_path, state, memory=memory, every=holdfast.Every(memory=1), when_busy="queue"
        ) as ckpt,
    ):
        for step in range(1, 12):
            train(model, optimizer)
            ckpt.step(step)
            ckpt.wait(WAIT_S)
        expected = model.weight.detach().clone()
        with torch.no_grad():
            model.weight.zero_()
        assert ckpt.restore() == 11
    torch.testing.assert_close(model.weight, expected)
    assert "twins.learned" in seen and not {"twins.lost", "twins.ended"} & {*seen}


def busy(purpose: str) -> None:
    """Have our stream for a purpose do something else first."""
    with devices.on_stream(devices.stream_of(torch.device(DEVICE), purpose)):
        occupy(0.15)


@pytest.mark.parametrize("stays", [False, True])
def test_gradients_whose_copy_comes_late(tmp_path: Path, stays: bool) -> None:
    """Those that stay are written to again by the next step, behind the copy."""
    model, optimizer = trained()
    state = {"model": model, "optim": optimizer}
    options = {"every": holdfast.Every(durable=100, delta=1), "on_error": "raise"}
    with holdfast.Checkpointer(tmp_path, state, delta=holdfast.Delta(), **options) as ckpt:
        for step in range(1, 8):
            busy("records")
            optimizer.zero_grad(set_to_none=not stays)
            x = torch.full((4, model.in_features), float(step), device=DEVICE)
            model(x).square().mean().backward()
            optimizer.step()
            ckpt.step(step)
        expected = model.weight.detach().clone()
        with torch.no_grad():
            model.weight.zero_()
        assert ckpt.restore() == 7
    assert torch.equal(model.weight, expected)


def test_rounded_gradients_whose_copy_comes_late(tmp_path: Path) -> None:
    """Whether they are as declared is known when they are copied, and that is waited for."""
    weight = nn.Parameter(torch.zeros(64, 64, device=DEVICE))
    holdfast.compression.rounded([weight], torch.bfloat16)
    optimizer = torch.optim.SGD([weight], lr=0.125)
    state = {"weight": {"w": weight}, "optim": optimizer}
    options = {"every": holdfast.Every(durable=100, delta=1), "on_error": "raise"}
    with holdfast.Checkpointer(tmp_path, state, delta=holdfast.Delta(), **options) as ckpt:
        for step in range(1, 8):
            busy("records")
            optimizer.zero_grad(set_to_none=False)
            (weight * float(step)).sum().backward()
            optimizer.step()
            ckpt.step(step)
        expected = weight.detach().clone()
        with torch.no_grad():
            weight.zero_()
        assert ckpt.restore() == 7
    assert torch.equal(weight, expected)


@pytest.mark.parametrize("writes", ["another's", "own"])
def test_gradients_that_are_written_to_before_they_are_copied(tmp_path: Path, writes: str) -> None:
    """Where somebody else has their memory they are not lent; where nobody has, a write to them is seen."""
    model, optimizer = trained()
    state = {"model": model, "optim": optimizer}
    options = {"every": holdfast.Every(durable=100, delta=1), "on_error": "raise"}

    def recorded(ckpt: holdfast.Checkpointer) -> None:
        for step in range(1, 10):
            busy("records")
            optimizer.zero_grad()
            model(torch.full((4, 64), float(step), device=DEVICE)).square().mean().backward()
            mine = [p.grad for p in model.parameters()]
            others = [grad.data for grad in mine] if writes == "another's" else []
            optimizer.step()
            ckpt.step(step)
            for grad in others or mine:
                grad.zero_()

    with holdfast.Checkpointer(tmp_path, state, delta=holdfast.Delta(), **options) as ckpt:
        if writes == "own":
            with pytest.raises(HoldfastError, match="gradients were written to"):
                recorded(ckpt)
            return
        recorded(ckpt)
        expected = model.weight.detach().clone()
        with torch.no_grad():
            model.weight.zero_()
        assert ckpt.restore() == 9
    assert torch.equal(model.weight, expected)


def test_what_is_carried_is_read_when_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training's stream has much to do before it sets the rest of a snapshot aside."""
    monkeypatch.setattr(copy_timing, "COPIED_AT_CALL_BYTES", 0)
    monkeypatch.setattr(snapshot, "BATCH_BYTES", 1)
    model, optimizer = trained()
    state, weights, carried = {"model": model, "optim": optimizer}, {}, []
    options = {"every": holdfast.Every(memory=1), "when_busy": "queue"}
    memory = holdfast.Memory("none", carry="1MB")

    def note(event: holdfast.events.Event) -> None:
        carried.append(event.name == "window.wait" and event.fields.get("carried"))

    with (
        holdfast.events.listen(note),
        holdfast.Checkpointer(tmp_path, state, memory=memory, **options) as ckpt,
    ):
        for step in range(1, 6):
            train(model, optimizer)
            weights[step] = {n: p.detach().clone() for n, p in model.named_parameters()}
            busy("snapshot")
            ckpt.step(step)
            occupy(0.3)
        train(model, optimizer)
        ckpt.wait(WAIT_S)
        restored = ckpt.restore()
    assert any(carried)
    for name, p in model.named_parameters():
        assert torch.equal(p, weights[restored][name]), name


class Graph:
    """A graph of this kind of device."""

    def __init__(self) -> None:
        kind = torch.cuda.CUDAGraph
        if DEVICE.startswith("late"):
            from system.late import device

            kind = device.Graph
            if not hasattr(kind.capture_begin, "__wrapped__"):
                graphs.observe(kind)
        self._graph = kind()

    def __enter__(self) -> None:
        self._stream = torch.Stream(torch.device(DEVICE))
        self._on_stream = devices.on_stream(self._stream)
        self._on_stream.__enter__()
        self._graph.capture_begin()

    def __exit__(self, *raised: object) -> None:
        try:
            self._graph.capture_end()
        finally:
            self._on_stream.__exit__(None, None, None)


@pytest.mark.parametrize("tier", ["durable", "memory", "records", "carry"])
def test_a_graph_is_captured_beside_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    """The first save reserves and page-locks memory, and copies: none of it while a graph is captured."""
    monkeypatch.setattr(graphs, "_has_captured", False)
    model, optimizer = trained(512)
    options: dict[str, Any] = {
        "memory": {
            "memory": holdfast.Memory("none"),
            "every": holdfast.Every(memory=1),
            "when_busy": "queue",
        },
        "records": {"delta": holdfast.Delta(), "every": holdfast.Every(durable=4, delta=1)},
        "carry": {
            "memory": holdfast.Memory("none", carry="1MB"),
            "every": holdfast.Every(memory=1),
            "when_busy": "queue",
        },
    }
    state = {"model": model, "optim": optimizer}
    weights = {}
    with holdfast.Checkpointer(tmp_path, state, **options.get(tier, {})) as ckpt:
        for step in range(1, 5):
            train(model, optimizer)
            weights[step] = model.weight.detach().clone()
            ckpt.save(step) if tier == "durable" else ckpt.step(step)
            optimizer.zero_grad()
            with Graph():
                doubled = model.weight * 2
                optimizer.step()  # captured, and not made: a record of it would be one too many
                time.sleep(0.05)
            del doubled
        ckpt.wait(WAIT_S)
        with torch.no_grad():
            model.weight.zero_()
        step = ckpt.restore()
        assert step >= 3 and torch.equal(model.weight, weights[step])


class Holds:
    """An object with a tensor that is small enough to lie among its plain values."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


@pytest.mark.parametrize("model_too", [False, True])
@pytest.mark.parametrize("where", ["small", "large", "object"])
def test_tensors_of_the_host_that_a_device_writes(
    tmp_path: Path, where: str, model_too: bool
) -> None:
    """As offloading does: the copy to the host is still to be made when the save is called."""
    size = 5 << 20 if where == "large" else 100
    there, host = torch.ones(size, device=DEVICE), torch.zeros(size, pin_memory=True)

    def state_of(tensor: torch.Tensor) -> dict[str, Any]:
        model = {"model": trained()[0]} if model_too else {}
        return {"host": Holds(tensor) if where == "object" else tensor, **model}

    state = state_of(host)
    with devices.on(torch.device(DEVICE)), holdfast.Checkpointer(tmp_path, state) as ckpt:
        for step in range(1, 4):
            occupy(0.2)
            there += 1
            host.copy_(there, non_blocking=True)
            ckpt.save(step).wait(WAIT_S)
    for step in range(1, 4):
        found = state_of(torch.zeros(size))
        holdfast.load(tmp_path, found, step=step)
        value = found["host"].tensor if where == "object" else found["host"]
        assert torch.equal(value, torch.full((size,), step + 1.0)), step
