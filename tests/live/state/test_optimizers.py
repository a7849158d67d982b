"""A run that is saved, restored into fresh objects and continued is the uninterrupted run, bit by bit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from capabilities import MUON
from holdfast.core.group import meet
from holdfast.errors import StateMismatch, UsageError
from holdfast.live.restore.optimizer_states import put_common_state
from holdfast.live.restore.param_groups import moved_groups
from holdfast.live.restore.targets import RestoreOptions
from holdfast.live.restore_into_state import restore

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class Net(nn.Module):
    """`unused` never has a gradient; `late` has its first after some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.second = nn.Linear(16, 5)
        self.unused = nn.Linear(3, 3)
        self.late = nn.Linear(16, 5, bias=False)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return self.second(hidden) + (self.late(hidden) if step >= 4 else 0)


def groups(net: Net) -> list[dict[str, Any]]:
    """Two groups with hyper-parameters of their own, which the run then changes."""
    return [
        {"params": [net.first.weight, net.second.weight, net.late.weight], "weight_decay": 0.02},
        {"params": [net.first.bias, net.second.bias, *net.unused.parameters()], "lr": 0.003},
    ]


def matrices(net: Net) -> list[dict[str, Any]]:
    """Muon takes matrices alone."""
    return [
        {"params": [net.first.weight, net.unused.weight], "weight_decay": 0.02},
        {"params": [net.second.weight, net.late.weight], "lr": 0.003},
    ]


def train(net: Net, optimizer: torch.optim.Optimizer, start: int, stop: int) -> list[bytes]:
    """Steps `start..stop`; the loss after each, as bytes.  Changes hyper-parameters on the way."""
    losses = []
    for step in range(start, stop):
        x = torch.sin(torch.arange(96.0).reshape(8, 12) * (step + 1))
        loss = net(x, step).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9
        losses.append(loss.detach().numpy().tobytes())
    return losses


def build(make: Make, split: Callable[[Net], list[dict[str, Any]]], seed: int) -> tuple[Net, Any]:
    torch.manual_seed(seed)
    net = Net()
    return net, make(split(net))


class Counted(torch.optim.Optimizer):
    """Its steps depend on state that belongs to no parameter: a counter (as MADGRAD has it), plain values,
    a tensor too large to be among them."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        own: dict[Any, Any] = self.state
        own.setdefault("k", torch.tensor([0]))
        own.setdefault("large", torch.zeros(20_000)).add_(1)
        own["seen"] = {"rates": [*own.get("seen", {"rates": []})["rates"], float(own["k"]) + 1]}
        rate = sum(own["seen"]["rates"]) / float(own["k"] + own["large"][-1])
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                sums = self.state[p].setdefault("sum", torch.zeros_like(p))
                p.add_(sums.add_(p.grad), alpha=-rate * group["lr"])
        own["k"] += 1


OPTIMIZERS: dict[str, Make] = {
    "counted": Counted,
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adam-maximize": lambda p: torch.optim.Adam(p, lr=1e-4, maximize=True),
    "adam-tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "adamw-loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def check_goes_on(
    path: Path, make: Make, split: Callable[[Net], list[dict[str, Any]]], *, used: bool
) -> None:
    """Restore at step 3 and at step 5; `used`: into an optimizer that has state of its own."""
    net, optimizer = build(make, split, seed=0)
    whole = train(net, optimizer, 0, 3)
    holdfast.save(path, {"net": net, "optim": optimizer}, step=3)
    whole += train(net, optimizer, 3, 5)
    holdfast.save(path, {"net": net, "optim": optimizer}, step=5)
    whole += train(net, optimizer, 5, 8)
    for step in (3, 5):
        other, fresh = build(make, split, seed=1)
        if used:
            train(other, fresh, 3, 6)
        state = {"net": other, "optim": fresh}
        assert holdfast.load(path, state, step=step) == step
        assert train(other, fresh, step, 8) == whole[step:]
        assert same(fresh.state_dict(), optimizer.state_dict()) == []


def same(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two nested values differ, in type, dtype, device or bits."""
    if type(a) is not type(b):
        return [f"{path}: {type(a)} and {type(b)}"]
    if isinstance(a, torch.Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape and a.device == b.device
        return [] if alike and torch.equal(a, b) else [path]
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [f"{path}: keys {sorted(map(str, a.keys() ^ b.keys()))}"]
        return [x for k in a for x in same(a[k], b[k], f"{path}.{k}")]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{path}: lengths {len(a)} and {len(b)}"]
        return [x for i, (p, q) in enumerate(zip(a, b)) for x in same(p, q, f"{path}[{i}]")]
    return [] if a == b else [f"{path}: {a} and {b}"]


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_goes_on_bit_by_bit(tmp_path: Path, name: str, used: bool) -> None:
    check_goes_on(tmp_path, OPTIMIZERS[name], groups, used=used)


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_muon_goes_on_bit_by_bit(tmp_path: Path, used: bool) -> None:
    MUON.require()
    check_goes_on(tmp_path, lambda p: torch.optim.Muon(p, lr=0.01), matrices, used=used)


def test_lbfgs_goes_on_bit_by_bit(tmp_path: Path) -> None:
    """Its state holds lists of tensors and counters."""

    def make(seed: int) -> tuple[nn.Linear, torch.optim.LBFGS]:
        torch.manual_seed(seed)
        net = nn.Linear(4, 3)
        return net, torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)

    def steps(net: nn.Linear, optimizer: torch.optim.LBFGS, count: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(torch.eye(4)).sin().square().sum()
            loss.backward()
            return loss

        for _ in range(count):
            optimizer.step(closure)

    net, optimizer = make(0)
    steps(net, optimizer, 2)
    holdfast.save(tmp_path, {"net": net, "optim": optimizer}, step=2)
    steps(net, optimizer, 2)
    other, fresh = make(1)
    holdfast.load(tmp_path, {"net": other, "optim": fresh})
    steps(other, fresh, 2)
    assert same(other.state_dict(), net.state_dict()) == []


@pytest.mark.parametrize("order", [(1, 0), (0,), (0, 1, 2)])
def test_vectors_of_all_parameters_are_for_the_same_parameters(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    """An LBFGS over others, or in another order, would go on with a wrong direction, or fail in a step."""

    def new(which: tuple[int, ...]) -> dict[str, Any]:
        net = nn.ParameterDict({f"p{i}": torch.full((3,), float(i + 1)) for i in range(3)})
        params = [net[f"p{i}"] for i in which]
        return {"net": net, "optim": torch.optim.LBFGS(params, lr=0.1, max_iter=3)}

    state = new((0, 1))
    net, optimizer = state["net"], state["optim"]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (net["p0"] * net["p1"] - 3).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    holdfast.save(tmp_path, state, step=1)
    assert holdfast.load(tmp_path, new((0, 1))) == 1
    other = new(order)
    with pytest.raises(
        StateMismatch, match="an LBFGS keeps one vector of all its parameters together"
    ):
        holdfast.load(tmp_path, other)
    assert not other["optim"].state and torch.equal(other["net"]["p0"], torch.ones(3))


def test_flags_of_each_group_come_back(tmp_path: Path) -> None:
    """What says what is computed is the saved run's; what says how is this run's."""
    flags = [
        {"amsgrad": True, "maximize": False, "lr": 0.1},
        {"amsgrad": False, "maximize": True, "lr": 0.2},
    ]

    def make(seed: int, given: list[dict[str, Any]]) -> tuple[Net, torch.optim.Adam]:
        torch.manual_seed(seed)
        net = Net()
        first, second = (g["params"] for g in groups(net))
        pairs = zip((first, second), given)
        return net, torch.optim.Adam([{"params": p, **one} for p, one in pairs])

    net, optimizer = make(0, flags)
    train(net, optimizer, 0, 3)
    holdfast.save(tmp_path, {"net": net, "optim": optimizer}, step=3)
    other, fresh = make(1, [{}, {}])
    holdfast.load(tmp_path, {"net": other, "optim": fresh})
    for saved, restored in zip(optimizer.param_groups, fresh.param_groups):
        assert {k: restored[k] for k in flags[0]} == {k: saved[k] for k in flags[0]}
    assert train(other, fresh, 3, 6) == train(net, optimizer, 3, 6)


@pytest.mark.parametrize("into", ["foreach", "fused", "loop"])
def test_the_implementation_is_this_runs_own(tmp_path: Path, into: str) -> None:
    net, optimizer = build(OPTIMIZERS["adamw-fused"], groups, seed=0)
    train(net, optimizer, 0, 3)
    holdfast.save(tmp_path, {"net": net, "optim": optimizer}, step=3)
    other, fresh = build(OPTIMIZERS[f"adamw-{into}"], groups, seed=1)
    flags = [(g["foreach"], g["fused"]) for g in fresh.param_groups]
    holdfast.load(tmp_path, {"net": other, "optim": fresh})
    assert [(g["foreach"], g["fused"]) for g in fresh.param_groups] == flags
    assert same(fresh.state_dict()["state"], optimizer.state_dict()["state"]) == []
    train(other, fresh, 3, 5)


def test_groups_in_another_order_take_their_own(tmp_path: Path) -> None:
    net, optimizer = build(OPTIMIZERS["adam"], groups, seed=0)
    train(net, optimizer, 0, 3)
    holdfast.save(tmp_path, {"net": net, "optim": optimizer}, step=3)
    other, fresh = build(OPTIMIZERS["adam"], lambda net: groups(net)[::-1], seed=1)
    holdfast.load(tmp_path, {"net": other, "optim": fresh})
    assert [g["lr"] for g in fresh.param_groups] == [g["lr"] for g in optimizer.param_groups][::-1]
    assert torch.equal(
        fresh.state[other.first.weight]["exp_avg"], optimizer.state[net.first.weight]["exp_avg"]
    )


@pytest.mark.parametrize("inside", [False, True], ids=["value", "list"])
def test_groups_in_another_order_with_a_scheduler_are_refused(tmp_path: Path, inside: bool) -> None:
    """It would give each the other's rate at its next step."""

    def make(order: int, rates: tuple[float, float] = (1e-4, 1e-3)) -> tuple[dict[str, Any], Any]:
        net = Net()
        both = [
            {"params": m.parameters(), "lr": lr} for m, lr in zip((net.first, net.second), rates)
        ]
        optimizer = torch.optim.SGD(both[::order], lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {
            "net": net,
            "optim": optimizer,
            "s": [scheduler] if inside else scheduler,
        }, optimizer

    holdfast.save(tmp_path, make(1)[0], step=1)
    state, optimizer = make(-1)
    with pytest.raises(
        StateMismatch, match=r"groups \[0, 1\] were saved by another number .* and s"
    ):
        holdfast.load(tmp_path, state)
    with pytest.warns(
        holdfast.errors.HoldfastWarning, match="in the order in which they were saved"
    ):
        holdfast.load(tmp_path, state, strict=False)
    assert [g["lr"] for g in optimizer.param_groups] == [1e-3, 1e-4]
    holdfast.load(tmp_path, {"net": state["net"], "optim": optimizer})
    holdfast.load(tmp_path, make(1)[0])
    holdfast.save(tmp_path, make(1, (1e-3, 1e-3))[0], step=2)
    holdfast.load(tmp_path, make(-1)[0])


def test_groups_split_otherwise_are_refused(tmp_path: Path) -> None:
    net, optimizer = build(OPTIMIZERS["adam"], groups, seed=0)
    train(net, optimizer, 0, 1)
    holdfast.save(tmp_path, {"net": net, "optim": optimizer}, step=1)
    other = Net()
    before = {n: p.clone() for n, p in other.named_parameters()}
    with pytest.raises(holdfast.errors.StateMismatch, match="group 0 of 'optim'"):
        holdfast.load(tmp_path, {"net": other, "optim": torch.optim.Adam(other.parameters())})
    assert same(dict(before), {n: p.detach() for n, p in other.named_parameters()}) == []


@pytest.mark.parametrize("name", ["adam", "counted"])
def test_a_new_optimizer_has_no_state_to_lose(tmp_path: Path, name: str) -> None:
    """Saved before the first step: what this optimizer has gathered meanwhile goes."""
    net, optimizer = build(OPTIMIZERS[name], groups, seed=0)
    holdfast.save(tmp_path, {"net": net, "optim": optimizer}, step=0)
    train(net, optimizer, 0, 2)
    assert holdfast.load(tmp_path, {"net": net, "optim": optimizer}) == 0
    assert not any(optimizer.state.values())


@pytest.mark.parametrize("saved", ["none", "other", "unused"])
def test_states_stay_that_a_load_which_is_not_strict_tells_nothing_of(
    tmp_path: Path, saved: str
) -> None:
    """Of a parameter in a group that was saved, it tells that there were none: all go, numbers too."""
    net, optimizer = build(OPTIMIZERS["adam"], groups, seed=0)
    few = torch.optim.Adam([net.first.weight])
    some = {"none": {}, "other": {"optim": few}, "unused": {"optim": optimizer}}[saved]
    holdfast.save(tmp_path, {"net": net, **some}, step=1)
    train(net, optimizer, 0, 2)
    for state in optimizer.state.values():
        state["step"] = int(state["step"])
    before = {p: set(state) for p, state in optimizer.state.items()}
    holdfast.load(tmp_path, {"net": net, "optim": optimizer}, strict=False)
    told = {"none": [], "other": [net.first.weight], "unused": list(net.parameters())}[saved]
    left = {p: names for p, names in before.items() if not any(p is one for one in told)}
    assert {p: set(state) for p, state in optimizer.state.items() if state} == left


@pytest.mark.parametrize("strict", [True, False])
def test_what_a_checkpoint_does_not_know_stays(tmp_path: Path, strict: bool) -> None:
    """One of before such state was saved, or of another program."""
    net, optimizer = build(OPTIMIZERS["adam"], groups, seed=0)
    train(net, optimizer, 0, 2)
    holdfast.save(tmp_path, {"net": net, "optim": optimizer}, step=2)
    other, counted = build(Counted, groups, seed=1)
    own: dict[Any, Any] = counted.state
    own["k"] = torch.tensor(5)
    assert holdfast.load(tmp_path, {"net": other, "optim": counted}, strict=strict) == 2
    assert int(own["k"]) == 5


@contextmanager
def untouched(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The optimizer is afterwards as it was before."""

    def copy(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: copy(v) for k, v in value.items()}
        if isinstance(value, list):
            return [copy(v) for v in value]
        return value.clone() if isinstance(value, torch.Tensor) else value

    before = copy(optimizer.state_dict())
    yield
    assert same(optimizer.state_dict(), before) == []


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_a_mismatch_leaves_the_optimizer_as_it_is(tmp_path: Path, used: bool) -> None:
    net, optimizer = build(OPTIMIZERS["adam"], groups, seed=0)
    train(net, optimizer, 0, 1)
    holdfast.save(tmp_path, {"net": net, "optim": optimizer}, step=1)
    other, fresh = build(OPTIMIZERS["adam-amsgrad"], groups, seed=1)
    if used:
        train(other, fresh, 0, 5)
    other.extra = nn.Linear(2, 2)
    with untouched(fresh), pytest.raises(holdfast.errors.StateMismatch, match=r"net\.extra"):
        holdfast.load(tmp_path, {"net": other, "optim": fresh})


def test_optimizer_of_parameters_in_no_module(tmp_path: Path) -> None:
    """Its states have the name of the tensor that the state has."""
    p = torch.nn.Parameter(torch.arange(5.0))
    optimizer = torch.optim.Adam([p], lr=0.1)
    p.grad = torch.ones(5)
    optimizer.step()
    holdfast.save(tmp_path, {"p": p, "optim": optimizer}, step=1)
    q = torch.nn.Parameter(torch.zeros(5))
    fresh = torch.optim.Adam([q], lr=0.5)
    holdfast.load(tmp_path, {"p": q, "optim": fresh})
    assert torch.equal(p, q)
    assert same(fresh.state_dict(), optimizer.state_dict()) == []
    assert "optim.p.exp_avg" in holdfast.open(str(tmp_path)).names()


def test_a_rate_that_is_a_tensor_is_filled(tmp_path: Path) -> None:
    """The script that holds it still changes what the optimizer uses."""

    def new(*values: float) -> tuple[list[torch.Tensor], torch.optim.Optimizer, dict[str, Any]]:
        net, rates = Net(), [torch.tensor(value) for value in values]
        parts = [
            {"params": m.parameters(), "lr": r} for m, r in zip((net.first, net.second), rates)
        ]
        optimizer = torch.optim.AdamW(parts, lr=rates[0], foreach=False)
        return rates, optimizer, {"net": net, "optim": optimizer}

    holdfast.save(tmp_path / "same", new(0.5, 0.5)[2], step=1)
    holdfast.save(tmp_path / "other", new(0.5, 0.25)[2], step=1)
    rates, optimizer, state = new(0.1, 0.2)
    for group in optimizer.param_groups[1:]:
        group["lr"] = rates[0]
    holdfast.load(tmp_path / "same", state)
    assert all(group["lr"] is rates[0] for group in optimizer.param_groups)
    assert rates[0] == 0.5
    holdfast.load(tmp_path / "other", state)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.25]
    assert optimizer.param_groups[0]["lr"] is rates[0]


@pytest.mark.parametrize("name", ["param", "buffer", "tensor", 0, ("a", 1)])
def test_a_state_that_would_not_be_found_again_is_refused(tmp_path: Path, name: Any) -> None:
    model = nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    optim.state[model.weight][name] = torch.zeros(2, 2)
    with pytest.raises(
        UsageError,
        match=re.escape(f"optim.weight: the optimizer has a state under the key {name!r}"),
    ):
        holdfast.save(tmp_path, {"model": model, "optim": optim}, step=1)


class Nested(torch.optim.SGD):
    """Its states are in lists and dicts, as those of some optimizers with preconditioners."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["m"] = [
                    torch.zeros_like(p),
                    {"v": torch.zeros_like(p), "norm": torch.zeros(2)},
                ]
            state["m"][0].lerp_(p.grad, 0.1)
            state["m"][1]["v"].add_(p.grad * p.grad)
            state["m"][1]["norm"] += 1
            p.sub_(state["m"][0] / (1 + state["m"][1]["v"]))


def test_sharded_states_in_lists_are_sharded_again(tmp_path: Path, mesh: Any) -> None:
    def new() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(6, 4, bias=False)
        weight = torch.arange(24.0).reshape(4, 6)
        model.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
        return model, Nested(model.parameters(), lr=1.0)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.weight.grad = model.weight.detach() * 0.5
        optimizer.step()

    model, optimizer = new()
    step(model, optimizer)
    holdfast.save(tmp_path / "root", {"model": model, "optim": optimizer}, step=1)
    step(model, optimizer)
    other, again = new()
    holdfast.load(tmp_path / "root", {"model": other, "optim": again})
    first, rest = again.state[other.weight]["m"]
    assert first.placements == rest["v"].placements == (Shard(0),)
    assert torch.equal(rest["norm"], torch.ones(2))
    step(other, again)
    assert torch.equal(other.weight.full_tensor(), model.weight.full_tensor())


def test_a_tensor_that_belongs_to_no_parameter_is_filled(tmp_path: Path) -> None:
    """A captured graph may hold it."""
    net, optimizer = build(Counted, groups, seed=0)
    train(net, optimizer, 0, 3)
    holdfast.save(tmp_path, {"net": net, "optim": optimizer}, step=3)
    train(net, optimizer, 3, 5)
    state: dict[Any, Any] = optimizer.state
    counter, large = state["k"], state["large"]
    holdfast.load(tmp_path, {"net": net, "optim": optimizer})
    assert state["k"] is counter and int(counter) == 3
    assert state["large"] is large and torch.equal(large, torch.full((20_000,), 3.0))


def test_sharded_state_that_belongs_to_no_parameter_is_refused(tmp_path: Path, mesh: Any) -> None:
    net, optimizer = build(Counted, groups, seed=0)
    optimizer.state["mean"] = {"of": [distribute_tensor(torch.zeros(4), mesh, [Shard(0)])]}
    with pytest.raises(holdfast.errors.UsageError, match=r"optim\.state\.mean\.of\[0\]: a DTensor"):
        holdfast.save(tmp_path / "root", {"net": net, "optim": optimizer}, step=1)


def test_the_fate_of_state_that_belongs_to_no_parameter_may_be_declared(tmp_path: Path) -> None:
    """Then tensors of any size may differ between ranks."""
    net, optimizer = build(Counted, groups, seed=0)
    train(net, optimizer, 0, 3)
    state = {"net": net, "optim": optimizer}
    with holdfast.Checkpointer(tmp_path, state, on_resize={"optim.common": "fresh"}) as ckpt:
        ckpt.save(3)
    with holdfast.open(tmp_path) as found:
        assert found.manifest.per_rank["optim.common"] == "fresh"
    other, fresh = build(Counted, groups, seed=1)
    holdfast.load(tmp_path, {"net": other, "optim": fresh})
    assert same(fresh.state_dict(), optimizer.state_dict()) == []


def test_what_lay_on_a_device_goes_to_that_of_the_parameters() -> None:
    """As far as that can be seen without one: the device here is `meta`."""
    optimizer = Counted([nn.Parameter(torch.zeros(3, device="meta"))])
    both = {"a": torch.ones(2), "b": {"of": [torch.ones(2)]}}
    put_common_state(optimizer, {"state": both | {"c": torch.ones(2)}, "on_device": ["a", "b"]})
    own: dict[Any, Any] = optimizer.state
    assert own["a"].is_meta and own["b"]["of"][0].is_meta and own["c"].device.type == "cpu"


def test_a_malformed_state_that_belongs_to_no_parameter(tmp_path: Path) -> None:
    net, optimizer = build(Counted, groups, seed=0)
    holdfast.save(tmp_path, {"net": net, "optim": optimizer}, step=1)
    with holdfast.open(tmp_path) as found:
        found.manifest.extras["optim.common"] = [1]
        with pytest.raises(holdfast.errors.FormatError, match=r"'optim\.common' is no state"):
            restore(found, {"net": net, "optim": optimizer}, meet(), RestoreOptions())


def test_groups_of_pipeline_stages_share_a_number() -> None:
    """One stage has groups with and without decay, another none with decay: no group has moved."""
    hypers = [
        {"lr": 1, "weight_decay": 1},
        {"lr": 2, "weight_decay": 0},
        {"lr": 3, "weight_decay": 0},
    ]
    groups = [
        {"number": number, "hyper": hyper, "params": [name]}
        for number, hyper, name in zip((0, 1, 0), hypers, "abc")
    ]
    tree = {"$optimizer": {"groups": groups}}
    tensor = torch.zeros(1)
    assert moved_groups("optim", tree, [[("a", tensor)], [("b", tensor)]]) == []
    assert moved_groups("optim", tree, [[("c", tensor)]]) == []
    assert moved_groups("optim", tree, [[("b", tensor)], [("a", tensor)]]) == [0, 1]
