"""Optimizers in lists, dicts and other optimizers: a run that goes on is the uninterrupted one."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward,
    _get_in_backward_optimizers,
)

import holdfast
from holdfast.errors import HoldfastError, StateMismatch, UsageError
from holdfast.live.state import copy_timing, snapshot
from holdfast.live.state.window import Window
from holdfast.tiers.memory.feed import check_feedable
from live.state.test_optimizers import Counted

AdamW, SGD, Adagrad = torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def three(net: Net) -> list[torch.optim.Optimizer]:
    """Of three kinds, one of them with two groups."""
    second = [{"params": [net.second.weight]}, {"params": [net.second.bias], "lr": 0.2}]
    return [
        AdamW(net.first.parameters(), lr=0.1),
        SGD(second, lr=0.05, momentum=0.9),
        Adagrad(net.third.parameters(), lr=0.1),
    ]


class Container(torch.optim.Optimizer):
    """As torchtitan's: it has all parameters, and optimizers that have the states."""

    def __init__(self, optimizers: Any) -> None:
        self.optimizers = optimizers
        super().__init__(
            [p for o in self.leaves() for g in o.param_groups for p in g["params"]], {}
        )

    def leaves(self) -> list[torch.optim.Optimizer]:
        given = self.optimizers
        values = given.values() if isinstance(given, dict) else given
        return list(chain(*(v if isinstance(v, list) else [v] for v in values)))

    def step(self, closure: Any = None) -> None:
        for optimizer in self.leaves():
            optimizer.step()


def in_dict(net: Net) -> dict[str, Any]:
    a, b, c = three(net)
    return {"matrices": [a, b], "rest": {"of it": c}}


MAKERS: dict[str, Callable[[Net], Any]] = {
    "list": three,
    "tuple": lambda net: tuple(three(net)),
    "dict": in_dict,
    "one": lambda net: [AdamW(net.parameters(), lr=0.1)],
    "container": lambda net: Container(three(net)),
    "container-dict": lambda net: Container(dict(enumerate(three(net)))),
    "container-nested": lambda net: Container({"a": three(net)[:2], "b": three(net)[2:]}),
    "container-of-one": lambda net: Container([AdamW(net.parameters(), lr=0.1)]),
    "list-of-containers": lambda net: [Container(three(net)[:2]), *three(net)[2:]],
    "one-per-parameter": lambda net: {p: AdamW([p], lr=0.1) for p in net.parameters()},
}


def leaves(value: Any) -> list[torch.optim.Optimizer]:
    if isinstance(value, Container):
        return list(chain(*map(leaves, value.leaves())))
    if isinstance(value, torch.optim.Optimizer):
        return [value]
    return list(chain(*map(leaves, value.values() if isinstance(value, dict) else value)))


def build(make: Callable[[Net], Any], seed: int) -> tuple[Net, Any]:
    torch.manual_seed(seed)
    net = Net()
    return net, make(net)


def train(net: Net, optimizers: Any, first: int, last: int) -> list[bytes]:
    """Losses of steps `first..last`, as bytes; learning rates change on the way."""
    found = []
    for step in range(first, last):
        x = torch.sin(torch.arange(32.0).reshape(8, 4) * (step + 1))
        loss = net(x).square().mean()
        loss.backward()
        for optimizer in leaves(optimizers):
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[-1]["lr"] *= 0.8
        found.append(loss.detach().numpy().tobytes())
    return found


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("name", MAKERS)
def test_goes_on_as_the_uninterrupted_run(tmp_path: Path, name: str, used: bool) -> None:
    net, optimizers = build(MAKERS[name], 0)
    train(net, optimizers, 0, 3)
    holdfast.save(tmp_path, {"model": net, "optim": optimizers, "epoch": 3}, step=3)
    expected = train(net, optimizers, 3, 6)
    net, optimizers = build(MAKERS[name], 1)
    if used:
        train(net, optimizers, 0, 2)
    state = {"model": net, "optim": optimizers, "epoch": 0}
    holdfast.load(tmp_path, state)
    assert train(net, optimizers, 3, 6) == expected
    assert state["optim"] is optimizers and state["epoch"] == 3


def test_a_checkpointer_takes_them_and_restores_in_place(tmp_path: Path) -> None:
    net, optimizers = build(three, 0)
    with holdfast.Checkpointer(tmp_path, {"model": net, "optim": optimizers, "at": [1]}) as ckpt:
        train(net, optimizers, 0, 2)
        ckpt.save(2)
        expected = train(net, optimizers, 2, 4)
        ckpt.save(4)
    net, optimizers = build(three, 1)
    at: list[int] = []
    state = {"model": net, "optim": optimizers, "at": at}
    with holdfast.Checkpointer(tmp_path, state) as ckpt:
        assert ckpt.restore(2) == 2
    assert train(net, optimizers, 2, 4) == expected
    assert state["optim"] is optimizers and state["at"] is at == [1]


def test_one_optimizer_and_several_are_one_checkpoint(tmp_path: Path) -> None:
    """As a pipeline's are, which has others on another number of ranks."""
    whole: Callable[[Net], Any] = MAKERS["one"]
    split: Callable[[Net], Any] = MAKERS["one-per-parameter"]
    for number, (first, then) in enumerate(((whole, split), (split, whole))):
        net, optimizers = build(first, 0)
        for optimizer in leaves(optimizers):  # of one group all have the same
            optimizer.param_groups[0]["lr"] = 0.07
        loss = net(torch.ones(4)).sum()
        loss.backward()
        for optimizer in leaves(optimizers):
            optimizer.step()
        holdfast.save(tmp_path, {"model": net, "optim": optimizers}, step=number + 1)
        expected = train(net, optimizers, 3, 4)
        net, optimizers = build(then, 1)
        holdfast.load(tmp_path, {"model": net, "optim": optimizers}, step=number + 1)
        for optimizer in leaves(optimizers):
            optimizer.zero_grad()
        assert train(net, optimizers, 3, 4)[0] == expected[0]
        groups = [g for o in leaves(optimizers) for g in o.param_groups]
        assert {g["lr"] for g in groups} == {0.07 * 0.8}


def test_parameters_that_only_the_optimizers_have(tmp_path: Path) -> None:
    def masters(seed: int) -> tuple[list[nn.Parameter], list[torch.optim.Optimizer]]:
        torch.manual_seed(seed)
        params = [nn.Parameter(torch.randn(n)) for n in (3, 4)]
        for p in params:
            p.grad = torch.ones_like(p)
        return params, [AdamW([params[0]]), AdamW([params[1]])]

    params, optimizers = masters(0)
    for optimizer in optimizers:
        optimizer.step()
    holdfast.save(tmp_path, {"optim": optimizers}, step=1)
    with holdfast.open(tmp_path) as saved:
        assert {"optim.group0.0.value", "optim.group1.0.value"} <= set(saved.names())
    again, others = masters(1)
    holdfast.load(tmp_path, {"optim": others})
    assert all(map(torch.equal, params, again))


@pytest.mark.parametrize("name", ["list", "container", "one-per-parameter"])
def test_the_step_of_each_part_waits_for_the_copy(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizers = build(MAKERS[name], 0)
    train(net, optimizers, 0, 1)
    monkeypatch.setattr(copy_timing, "COPIED_AT_CALL_BYTES", 0)
    go, waiting = threading.Event(), threading.Event()
    run, wait = snapshot.Copies.run, Window.wait

    def late(self: Any, *args: Any, **more: Any) -> None:
        assert go.wait(300)
        run(self, *args, **more)

    def watched(self: Any) -> None:
        waiting.set()
        wait(self)

    with holdfast.Checkpointer(tmp_path, {"model": net, "optim": optimizers}) as ckpt:
        ckpt.save(0).wait(60)  # the first one is copied at the call
        monkeypatch.setattr(snapshot.Copies, "run", late)
        monkeypatch.setattr(Window, "wait", watched)
        for number, part in enumerate(leaves(optimizers)):
            go.clear()
            before = [p.detach().clone() for p in net.parameters()]
            save = ckpt.save(number + 1)
            net(torch.ones(4)).sum().backward()
            waiting.clear()
            stepping = threading.Thread(target=part.step)
            stepping.start()
            assert waiting.wait(300)
            assert all(map(torch.equal, net.parameters(), before))
            go.set()
            stepping.join(300)
            save.wait(300)
            assert not all(map(torch.equal, net.parameters(), before))
            with holdfast.open(tmp_path, step=number + 1) as saved:
                for (of, _), old in zip(net.named_parameters(), before):
                    assert torch.equal(torch.from_numpy(saved.read(f"model.{of}")), old)


# -- refused --------------------------------------------------------------------------------------


def refused(value: Any, net: Net, message: str, root: Path, **more: Any) -> None:
    """By a save and by a load alike."""
    state = {"model": net, "optim": value, **more}
    with pytest.raises(UsageError, match=message):
        holdfast.save(root / "save", state, step=1)
    holdfast.save(root / "model", {"model": net}, step=1)
    with pytest.raises(HoldfastError, match=message):
        holdfast.load(root / "model", state)


def test_a_container_with_something_of_its_own(tmp_path: Path) -> None:
    net, container = build(MAKERS["container"], 0)
    container.state[net.first.weight]["slow"] = torch.zeros(6, 4)
    message = r"'optim': a Container around a AdamW \(\.optimizers\[0\]\), a SGD .*it has states of its own"
    refused(container, net, message, tmp_path)
    net, container = build(MAKERS["container"], 0)
    container.param_groups[0]["rate"] = 0.5
    refused(container, net, "its groups have 'rate' of their own", tmp_path)


class Ascending(torch.optim.Optimizer):
    """As SAM: the groups are those of the optimizer inside it, and a step leaves states of its own."""

    def __init__(self, base: torch.optim.Optimizer, own_groups: bool) -> None:
        self.base = base
        groups: Any = [p for g in base.param_groups for p in g["params"]]
        super().__init__(groups if own_groups else base.param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.climb()
        self.base.step()

    def climb(self) -> None:
        def keep(p: torch.Tensor) -> None:
            self.state[p]["old"] = p.clone()

        for group in self.param_groups:
            list(map(keep, group["params"]))


@pytest.mark.parametrize("own_groups", [False, True])
def test_an_optimizer_around_another_is_refused_once_it_has_states_of_its_own(
    tmp_path: Path, own_groups: bool
) -> None:
    """Before, all that there is of the two is saved, and comes back."""

    def fresh(seed: int) -> tuple[Net, Any]:
        return build(lambda net: Ascending(AdamW(net.parameters(), lr=0.1), own_groups), seed)

    def weights(net: Net, outer: Any) -> list[torch.Tensor]:
        for _ in range(3):
            outer.zero_grad()
            net(torch.ones(4)).square().mean().backward()
            outer.step()
        return [p.detach() for p in net.parameters()]

    net, outer = fresh(0)
    outer.base.param_groups[0]["lr"] = 0.2
    holdfast.save(tmp_path / "at first", {"model": net, "optim": outer}, step=1)
    again, other = fresh(1)
    holdfast.load(tmp_path / "at first", {"model": again, "optim": other})
    assert other.base.param_groups[0]["lr"] == 0.2
    assert all(map(torch.equal, weights(again, other), weights(net, outer)))
    message = r"'optim': a Ascending around a AdamW \(\.base\), .*it has states of its own, too"
    refused(outer, net, message, tmp_path / "after")
    both = {"model": net, "optim": outer, "inner": outer.base}
    holdfast.save(tmp_path / "both", both, step=1)
    again, other = fresh(1)
    with pytest.raises(StateMismatch, match="states saved are old; those of AdamW are exp_avg"):
        holdfast.load(tmp_path / "both", {"model": again, "optim": other})
    holdfast.load(tmp_path / "both", {"model": again, "optim": other, "inner": other.base})
    assert all(map(torch.equal, weights(again, other), weights(net, outer)))


def test_states_of_its_own_that_come_between_two_saves_of_a_run(tmp_path: Path) -> None:
    net, outer = build(lambda net: Ascending(AdamW(net.parameters()), own_groups=False), 0)
    with holdfast.Checkpointer(tmp_path, {"model": net, "optim": outer}) as ckpt:
        ckpt.save(0).wait()
        train(net, outer, 0, 1)
        for step in (1, 2):
            with pytest.raises(UsageError, match="it has states of its own, too"):
                ckpt.save(step).wait()
        ckpt.state["inner"] = outer.base
        ckpt.save(3).wait()
    assert holdfast.steps(tmp_path) == [0, 3]


class Watching(Container):
    """It looks at states, which are those of its parts."""

    def step(self, closure: Any = None) -> None:
        super().step()
        assert all(part.state for part in self.leaves())


def test_a_container_that_looks_at_the_states_of_its_parts_has_none(tmp_path: Path) -> None:
    net, outer = build(lambda net: Watching([AdamW(net.parameters())]), 0)
    holdfast.save(tmp_path, {"model": net, "optim": outer}, step=1)
    train(net, outer.optimizers, 0, 1)
    holdfast.save(tmp_path, {"model": net, "optim": outer}, step=2)


def test_a_container_whose_parts_are_others(tmp_path: Path) -> None:
    net, container = build(MAKERS["container"], 0)
    last = container.optimizers.pop()
    refused(container, net, "its groups have other parameters than theirs", tmp_path)
    container.optimizers += [last, AdamW(net.third.parameters())]
    refused(container, net, "some of them have the same parameter", tmp_path)


def test_a_container_of_which_the_state_has_a_part(tmp_path: Path) -> None:
    net, container = build(MAKERS["container"], 0)
    first = container.optimizers[0]
    refused(
        container, net, r"a SGD \(\.optimizers\[1\]\).*others of it are in", tmp_path, one=first
    )
    apart = {f"part{i}": one for i, one in enumerate(container.optimizers)}
    train(net, container, 0, 1)
    holdfast.save(tmp_path / "apart", {"model": net, "optim": container, **apart}, step=1)
    with holdfast.open(tmp_path / "apart") as saved:
        assert "part0.first.weight.exp_avg" in saved.names()


def test_a_list_with_something_else_in_it(tmp_path: Path) -> None:
    net, optimizers = build(three, 0)
    refused([*optimizers, 3], net, r"optim\[3\]: a int among optimizers", tmp_path)
    with pytest.raises(
        UsageError, match=r"optim\.\[1\]: a torch.optim.adamw.AdamW cannot be saved"
    ):
        holdfast.save(tmp_path, {"model": net, "optim": [3, optimizers[0]]}, step=1)


def test_one_parameter_in_two_parts(tmp_path: Path) -> None:
    net = Net()
    optimizers = [SGD(net.parameters(), lr=1), AdamW(net.third.parameters())]
    refused(
        optimizers, net, r"optim\[0\] and optim\[1\] have the same parameter of shape", tmp_path
    )


def test_one_optimizer_twice(tmp_path: Path) -> None:
    net, optimizers = build(three, 0)
    message = r"(again and optim\[2\]|optim\[2\] and again) are the same Adagrad"
    refused(optimizers, net, message, tmp_path, again=optimizers[2])


def test_state_that_belongs_to_no_parameter(tmp_path: Path) -> None:
    """Of one alone it is that one's; of several nobody could tell."""
    net = Net()
    rest = [*net.second.parameters(), *net.third.parameters()]
    pair = [Counted(net.first.parameters()), AdamW(rest)]
    train(net, pair, 0, 1)
    with pytest.raises(UsageError, match=r"optim\[0\]: a Counted with state that belongs to no"):
        holdfast.save(tmp_path, {"model": net, "optim": pair}, step=1)
    alone = Counted(net.parameters())
    train(net, alone, 0, 1)
    holdfast.save(tmp_path, {"model": net, "optim": [alone]}, step=1)
    other = Counted(net.parameters())
    holdfast.load(tmp_path, {"model": net, "optim": other})
    assert other.state["k"] == 1
    alone.state[7] = 1
    holdfast.save(tmp_path, {"model": net, "optim": alone}, step=2)
    own, by_rank = {"model": net, "optim": alone}, {"optim.common": "rank0"}
    with holdfast.Checkpointer(tmp_path / "by rank", own, on_resize=by_rank) as ckpt:
        ckpt.save(2)
    before = [p.detach().clone() for p in net.parameters()]
    pair = [Counted(net.first.parameters()), Counted(rest)]
    message = r"optim: state .* saved \('k', 'large', 'seen', 7\).*of the 2 optimizers"
    for root in (tmp_path, tmp_path / "by rank"):
        with pytest.raises(StateMismatch, match=message):
            holdfast.load(root, {"model": net, "optim": pair})
        assert all(map(torch.equal, net.parameters(), before))


def record(root: Path, state: dict[str, Any]) -> None:
    every = holdfast.Every(durable=10, delta=1)
    with holdfast.Checkpointer(root, state, delta=holdfast.Delta(), every=every) as ckpt:
        train(state["model"], state["optim"], 0, 1)
        ckpt.step(1)


def test_records_and_twins_take_optimizers_one_by_one(tmp_path: Path) -> None:
    for name in ("list", "container", "container-of-one"):
        net, optimizers = build(MAKERS[name], 0)
        state = {"model": net, "optim": optimizers}
        one = name == "container-of-one"
        why = "cannot see the steps of 'optim'" if one else "follows .*'optim' is 3 of them in a"
        with pytest.raises(UsageError, match=f"delta= {why}"):
            record(tmp_path / name, state)
        with pytest.raises(UsageError, match=rf"Memory\(feed=\"gradient\"\) {why}"):
            check_feedable(state)


# -- in backward ----------------------------------------------------------------------------------


def in_backward(seed: int) -> tuple[Net, list[torch.optim.Optimizer]]:
    torch.manual_seed(seed)
    net = Net()
    _apply_optimizer_in_backward(AdamW, net.parameters(), {"lr": 0.1})
    return net, _get_in_backward_optimizers(net)


def backward(net: Net, first: int, last: int) -> list[bytes]:
    found = []
    for step in range(first, last):
        loss = net(torch.sin(torch.arange(32.0).reshape(8, 4) * (step + 1))).square().mean()
        loss.backward()
        found.append(loss.detach().numpy().tobytes())
    return found


def test_optimizers_that_step_in_backward(tmp_path: Path) -> None:
    net, optimizers = in_backward(0)
    with holdfast.Checkpointer(
        tmp_path, {"model": net, "optim": optimizers}, every=holdfast.Every(durable=1)
    ) as ckpt:
        for step in range(1, 4):
            backward(net, step - 1, step)
            ckpt.step(step)
            ckpt.wait()
    expected = backward(net, 3, 6)
    net, optimizers = in_backward(1)
    holdfast.load(tmp_path, {"model": net, "optim": optimizers})
    assert backward(net, 3, 6) == expected


def test_optimizers_in_backward_that_are_not_in_the_state_are_named(tmp_path: Path) -> None:
    net, optimizers = in_backward(0)
    message = "AdamW of first.weight, AdamW of first.bias, .* and 2 more"
    with pytest.raises(UsageError, match=message):
        holdfast.save(tmp_path, {"model": net}, step=1)
    with pytest.raises(UsageError, match=r"would be lost: AdamW of third\.bias \(step"):
        holdfast.save(tmp_path, {"model": net, "optim": optimizers[:-1]}, step=1)
    holdfast.save(tmp_path, {"model": net.state_dict()}, step=1)


# -- what their own state_dict() has --------------------------------------------------------------


class Flat(Container):
    """Its state_dict() is flat, as torchtitan's; `more` is nowhere else."""

    more: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        found = dict(self.more)
        for number, part in enumerate(self.leaves()):
            for i, states in part.state_dict()["state"].items():
                found |= {f"state.{number}.{i}.{k}": v for k, v in states.items()}
            found[f"param_groups.{number}.lr"] = part.param_groups[0]["lr"]
        return found


def test_what_only_a_containers_own_state_dict_has_is_refused(tmp_path: Path) -> None:
    net, container = build(lambda net: Flat(three(net)), 0)
    train(net, container, 0, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        holdfast.save(tmp_path, {"model": net, "optim": container}, step=1)
    container.more = {"rounds": 4}
    with pytest.raises(UsageError, match="state_dict\\(\\) of Flat has 'rounds' beside"):
        holdfast.save(tmp_path, {"model": net, "optim": container}, step=2)
    holdfast.ignore(container, "rounds")
    holdfast.save(tmp_path, {"model": net, "optim": container}, step=2)


def test_zero1_among_others(tmp_path: Path, mesh: Any) -> None:
    def make(net: Net) -> list[torch.optim.Optimizer]:
        zero1 = ZeroRedundancyOptimizer(net.first.parameters(), AdamW, lr=0.1)
        return [zero1, AdamW([*net.second.parameters(), *net.third.parameters()], lr=0.1)]

    net, optimizers = build(make, 0)
    train(net, optimizers, 0, 2)
    holdfast.save(tmp_path / "root", {"model": net, "optim": optimizers}, step=2)
    expected = train(net, optimizers, 2, 4)
    net, optimizers = build(make, 1)
    holdfast.load(tmp_path / "root", {"model": net, "optim": optimizers})
    assert train(net, optimizers, 2, 4) == expected


def test_other_groups_are_told_as_of_one_optimizer(tmp_path: Path) -> None:
    net, optimizers = build(three, 0)
    train(net, optimizers, 0, 2)
    holdfast.save(tmp_path, {"model": net, "optim": optimizers}, step=1)
    with pytest.raises(StateMismatch, match="group 0 of 'optim' were in groups"):
        holdfast.load(tmp_path, {"model": net, "optim": AdamW(net.parameters())})
