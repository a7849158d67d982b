"""Snapshots and restores of tensors on a device (`gpu.devices`)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.live.state.devices import on_stream
from holdfast.tiers.records import packing
from live.state.test_devices import Sums
from live.state.test_nested_objects import Kept
from system.gpu.devices import DEVICE, needs_device, occupy

pytestmark = needs_device
in_a_graph = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are of CUDA")

WAIT_S = 60.0
WIDTH = 2048 if DEVICE.startswith("cuda") else 128  # a simulated device computes on the CPU


class Net(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout())
        self.narrow = nn.Parameter(torch.randn(333, 77, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.body(x).square().mean() + self.narrow.float().mean()


def make(seed: int, **options: Any) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net().to(DEVICE)
    return net, torch.optim.AdamW(net.parameters(), lr=0.001, **options)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(torch.ones(16, WIDTH, device=DEVICE))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def copies(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {f"model.{n}": t.cpu().clone() for n, t in net.state_dict().items()}
    for name, p in net.named_parameters():
        found |= {f"optim.{name}.{k}": v.cpu().clone() for k, v in optimizer.state[p].items()}
    return found


def check_saved(root: Path, step: int, expected: dict[str, torch.Tensor]) -> None:
    with holdfast.open(str(root), step=step) as checkpoint:
        assert set(checkpoint.names()) == set(expected)
        for name, tensor in expected.items():
            flat = tensor.contiguous().reshape(-1).view(torch.uint8)
            assert checkpoint.read(name).tobytes() == flat.numpy().tobytes(), name


def test_snapshots_are_of_the_moment_of_the_call(tmp_path: Path) -> None:
    """Kernels of the step before are still queued at the call, those of the next follow at once."""
    net, optimizer = make(0)
    with holdfast.Checkpointer(tmp_path, {"model": net, "optim": optimizer}) as ckpt:
        expected, saves = {}, []
        for step in range(1, 6):
            train(net, optimizer, 2)
            expected[step] = copies(net, optimizer)
            saves.append(ckpt.save(step))
        train(net, optimizer, 3)
        for save in saves:
            save.wait(WAIT_S)
    for step, tensors in expected.items():
        check_saved(tmp_path, step, tensors)


def test_the_copy_waits_for_queued_kernels(tmp_path: Path) -> None:
    """The training stream is busy when the save is called: the copy must come after."""
    net, optimizer = make(0)
    train(net, optimizer, 1)
    big = torch.randn(2 * WIDTH, 2 * WIDTH, device=DEVICE)
    with holdfast.Checkpointer(tmp_path, {"model": net, "optim": optimizer}) as ckpt:
        for _ in range(50):
            big = big @ big.t() / (2 * WIDTH)
        with torch.no_grad():
            net.body[0].weight.copy_(big[:WIDTH, :WIDTH])
        ckpt.save(1).wait(WAIT_S)
    check_saved(tmp_path, 1, copies(net, optimizer))


def test_the_copy_waits_for_a_step_on_a_stream_that_nobody_has_joined_yet(tmp_path: Path) -> None:
    net, optimizer = make(0)
    train(net, optimizer, 1)
    side = torch.Stream(torch.device(DEVICE))
    with holdfast.Checkpointer(tmp_path, {"model": net, "optim": optimizer}) as ckpt:
        side.wait_stream(torch.accelerator.current_stream(torch.device(DEVICE)))
        optimizer.zero_grad()
        with on_stream(side):
            net(torch.ones(16, WIDTH, device=DEVICE)).backward()
            occupy(1.0)
            optimizer.step()
        save = ckpt.save(1)
        torch.accelerator.current_stream(torch.device(DEVICE)).wait_stream(side)
        save.wait(WAIT_S)
    check_saved(tmp_path, 1, copies(net, optimizer))


@pytest.mark.parametrize("where", ["load", "restore"])
def test_a_restore_is_in_turn_with_a_stream_of_the_training(tmp_path: Path, where: str) -> None:
    """Behind what the stream was given before, and before what it is given next."""
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)]).to(
        DEVICE
    )  # for several threads
    expected = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    with holdfast.Checkpointer(tmp_path, {"model": model}) as ckpt:
        ckpt.save(1).wait(60)
    stream = torch.Stream(torch.device(DEVICE))
    with (
        torch.cuda.stream(stream) if DEVICE.startswith("cuda") else stream,
        torch.no_grad(),
        holdfast.Checkpointer(tmp_path, {"model": model}) as ckpt,
    ):
        occupy(0.3)
        for p in model.parameters():
            p.fill_(7)
        assert (
            ckpt.restore() if where == "restore" else holdfast.load(tmp_path, {"model": model})
        ) == 1
        found = {name: p.clone() for name, p in model.named_parameters()}
        for p in model.parameters():
            p.zero_()
        assert all(torch.equal(found[name].cpu(), value) for name, value in expected.items())


def test_a_restore_that_finds_damage_leaves_no_copy_behind(tmp_path: Path) -> None:
    """The device still copies what was read before, while the damage is met; then all is NaN, for good."""
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)]).to(DEVICE)
    holdfast.save(tmp_path, {"model": model}, step=1)
    (image,) = tmp_path.rglob("*.safetensors")
    data = bytearray(image.read_bytes())
    data[len(data) // 2] ^= 1
    image.write_bytes(data)
    with pytest.raises(holdfast.HoldfastError):
        holdfast.load(tmp_path, {"model": model})
    torch.accelerator.synchronize(torch.device(DEVICE))
    time.sleep(0.2)
    assert all(bool(p.isnan().all()) for p in model.parameters())


@in_a_graph
@pytest.mark.parametrize("captured", ["before", "after"])
def test_steps_in_a_graph_come_after_the_copy(tmp_path: Path, captured: str) -> None:
    """A replay calls no hooks and counts no writes; also if captured before there are saves."""
    net, optimizer = make(0, capturable=True)
    x, graph = torch.ones(16, WIDTH, device=DEVICE), torch.cuda.CUDAGraph()
    state = {"model": net, "optim": optimizer}

    def capture() -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            train(net, optimizer, 3)
        torch.cuda.current_stream().wait_stream(stream)
        optimizer.zero_grad()
        with torch.cuda.graph(graph):
            net(x).backward()
            optimizer.step()

    if captured == "before":
        capture()
    with holdfast.Checkpointer(tmp_path, state) as ckpt:
        if captured == "after":
            capture()
        expected = {}
        for step in range(1, 6):
            graph.replay()
            expected[step] = copies(net, optimizer)
            ckpt.save(step)
    for step, tensors in expected.items():
        check_saved(tmp_path, step, tensors)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}, {"foreach": False}])
def test_goes_on_bit_by_bit(tmp_path: Path, options: dict[str, bool]) -> None:
    """With dropout: the device's random numbers go on too."""
    net, optimizer = make(0, **options)
    train(net, optimizer, 3)
    with holdfast.Checkpointer(tmp_path, {"model": net, "optim": optimizer}) as ckpt:
        ckpt.save(3).wait(WAIT_S)
    expected = train(net, optimizer, 3)
    other, fresh = make(1, **options)
    with holdfast.Checkpointer(tmp_path, {"model": other, "optim": fresh}) as ckpt:
        assert ckpt.restore() == 3
    assert train(other, fresh, 3) == expected
    for p, q in zip(net.parameters(), other.parameters()):
        assert torch.equal(p, q)
        for key, value in optimizer.state[p].items():
            assert fresh.state[q][key].device == value.device
            assert torch.equal(fresh.state[q][key], value)


@pytest.mark.parametrize("kind", [torch.optim.ASGD, torch.optim.NAdam, torch.optim.AdamW])
@pytest.mark.parametrize("foreach", [False, True])
def test_numbers_in_optimizers_go_on(tmp_path: Path, kind: Any, foreach: bool) -> None:
    """Beside parameters of any shape, one of which is a number itself."""

    def made(seed: int) -> tuple[nn.ParameterDict, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.ParameterDict({"scale": torch.randn(()), "weight": torch.randn(300)}).to(DEVICE)
        return model, kind(model.parameters(), foreach=foreach)

    def go_on(model: nn.ParameterDict, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        for _ in range(3):
            optimizer.zero_grad()
            (model["weight"] * model["scale"]).square().mean().backward()
            optimizer.step()
        return [p.detach().cpu().clone() for p in model.values()]

    model, optimizer = made(0)
    go_on(model, optimizer)
    holdfast.save(tmp_path, {"model": model, "optim": optimizer}, step=1)
    again, fresh = made(1)
    holdfast.load(tmp_path, {"model": again, "optim": fresh})
    for p in again.values():
        places = {state: not value.is_cpu for state, value in fresh.state[p].items()}
        assert places == {state: state != "step" for state in places}
    assert all(map(torch.equal, go_on(again, fresh), go_on(model, optimizer)))


def test_a_write_in_the_window_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.live.state import copy_timing, snapshot

    monkeypatch.setattr(copy_timing, "COPIED_AT_CALL_BYTES", 0)
    net, optimizer = make(0)
    train(net, optimizer, 1)
    original, edits = snapshot.Copies.run, iter([True])

    def edited(copies: Any, *args: Any) -> None:
        original(copies, *args)
        if next(edits, False):
            with torch.no_grad():
                net.body[0].weight.add_(1)

    with holdfast.Checkpointer(tmp_path, {"model": net, "optim": optimizer}) as ckpt:
        ckpt.save(0).wait(WAIT_S)
        monkeypatch.setattr(snapshot.Copies, "run", edited)
        with pytest.raises(holdfast.HoldfastError, match=r"model\.body\.0\.weight"):
            ckpt.save(1).wait(WAIT_S)
        ckpt.save(2).wait(WAIT_S)
    check_saved(tmp_path, 2, copies(net, optimizer))


def test_between_devices(tmp_path: Path) -> None:
    net, optimizer = make(0)
    train(net, optimizer, 1)
    holdfast.save(tmp_path, {"model": net, "optim": optimizer}, step=1)
    host = Net()
    fresh = torch.optim.AdamW(host.parameters())
    holdfast.load(tmp_path, {"model": host, "optim": fresh})
    expected = copies(net, optimizer)
    assert all(torch.equal(t, expected[n]) for n, t in copies(host, fresh).items())
    holdfast.save(tmp_path, {"model": host, "optim": fresh}, step=2)
    again, optimizer = make(1)
    holdfast.load(tmp_path, {"model": again, "optim": optimizer}, step=2)
    assert all(torch.equal(t, expected[n]) for n, t in copies(again, optimizer).items())


def test_meta_models_are_made_on_the_default_device(tmp_path: Path) -> None:
    net, _ = make(0)
    holdfast.save(tmp_path, {"model": net}, step=1)
    with torch.device("meta"):
        empty = Net()
    with torch.device(DEVICE):
        holdfast.load(tmp_path, {"model": empty})
    assert all(p.device == torch.device(DEVICE) for p in empty.parameters())
    assert all(torch.equal(a, b) for a, b in zip(empty.parameters(), net.parameters()))


def test_lbfgs_goes_on(tmp_path: Path) -> None:
    """Its past directions, in lists, are beside its parameters."""

    def made(seed: int) -> tuple[nn.Linear, torch.optim.LBFGS]:
        torch.manual_seed(seed)
        model = nn.Linear(200, 100).to(DEVICE)
        return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def go_on(model: nn.Linear, optimizer: torch.optim.LBFGS) -> list[float]:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(4, 200, device=DEVICE)).square().mean()
            loss.backward()
            return loss

        return [float(optimizer.step(closure)) for _ in range(2)]

    model, optimizer = made(0)
    go_on(model, optimizer)
    holdfast.save(tmp_path, {"model": model, "optim": optimizer}, step=1)
    expected = go_on(model, optimizer)
    again = made(1)
    holdfast.load(tmp_path, {"model": again[0], "optim": again[1]})
    state = again[1].state[again[0].weight]
    assert all(not t.is_cpu for t in (*state["old_dirs"], *state["old_stps"], *state["ro"]))
    assert go_on(*again) == expected


def test_metrics_stay_on_their_device(tmp_path: Path) -> None:
    sums, again = Sums(DEVICE), Sums(DEVICE)
    sums.total += 1
    sums.seen.append(torch.ones(3, device=DEVICE))
    holdfast.save(tmp_path, {"sums": nn.ModuleList([sums])}, step=1)
    holdfast.load(tmp_path, {"sums": nn.ModuleList([again])})
    assert not again.total.is_cpu and not again.seen[0].is_cpu
    assert (again.total.tolist(), again.seen[0].tolist()) == ([1, 1], [1, 1, 1])


def test_tensors_of_objects_stay_on_their_device(tmp_path: Path) -> None:
    """Those that are too large to lie among an object's plain values."""
    kept, again = Kept(4, 40_000), Kept(0, 40_000)
    kept.table, again.table = kept.table.to(DEVICE), again.table.to(DEVICE)
    holdfast.save(tmp_path, {"kept": kept}, step=1)
    holdfast.load(tmp_path, {"kept": again})
    assert not again.table.is_cpu and torch.equal(again.table, kept.table)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 100])
def test_what_is_not_zero_is_looked_for_in_pieces(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(packing, "MOST_AT_ONCE", 8)
    tensor = torch.arange(size, dtype=torch.float32) % 3
    where, bits = packing.nonzero(tensor.to(DEVICE))
    expected = packing.nonzero(tensor)
    assert where.tolist() == expected[0].tolist() and bits.tolist() == expected[1].tolist()
