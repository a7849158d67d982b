"""States of another optimizer: told before anything is touched, by what was saved and what is expected."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import holdfast
from capabilities import MUON
from holdfast.errors import HoldfastWarning, StateMismatch
from holdfast.live.restore.expected import ASKED, expected_states

Make = Callable[[Any], torch.optim.Optimizer]
optim = torch.optim


class Foreign(optim.Optimizer):
    """Of a class that nothing is known of: its states are all that tells."""

    def __init__(self, params: Any, names: tuple[str, ...] = ("state1", "state2")) -> None:
        super().__init__(params, {"lr": 0.1})
        self.names = names

    def step(self, closure: Any = None) -> None:
        for p in (p for g in self.param_groups for p in g["params"] if p.grad is not None):
            for name in self.names:
                self.state[p][name] = self.state[p].get(name, torch.zeros_like(p)) + p.grad


def trained(make: Make, steps: int = 2, seed: int = 0) -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(seed)
    net = nn.Linear(3, 2)
    optimizer = make(net.parameters())
    for _ in range(steps):
        step(net, optimizer)
    return net, optimizer


def step(net: nn.Module, optimizer: optim.Optimizer) -> bytes:
    net(torch.arange(3.0)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return net.weight.detach().numpy().tobytes()


def save(root: Path, make: Make, steps: int = 2) -> bytes:
    """What the weights are one step later."""
    net, optimizer = trained(make, steps)
    holdfast.save(root, {"model": net, "optim": optimizer}, step=1)
    return step(net, optimizer)


def sgd(momentum: float) -> Make:
    return lambda p: optim.SGD(p, lr=0.1, momentum=momentum)


ADAM = "exp_avg, exp_avg_sq, step"
OTHERS: dict[str, tuple[Make, Make, str, str]] = {
    "adamw-adagrad": (optim.AdamW, optim.Adagrad, ADAM, "step, sum"),
    "adagrad-adamw": (optim.Adagrad, optim.AdamW, "step, sum", ADAM),
    "adam-nadam": (optim.Adam, optim.NAdam, ADAM, "exp_avg, exp_avg_sq, mu_product, step"),
    "nadam-adam": (optim.NAdam, optim.Adam, "exp_avg, exp_avg_sq, mu_product, step", ADAM),
    "sgd-adam": (sgd(0.9), optim.Adam, "momentum_buffer", ADAM),
    "adam-sgd": (optim.Adam, sgd(0), ADAM, "none"),
    "adam-momentum": (optim.Adam, sgd(0.9), ADAM, "momentum_buffer"),
    "adam-rmsprop": (
        optim.Adam,
        lambda p: optim.RMSprop(p, centered=True),
        ADAM,
        "grad_avg, square_avg, step",
    ),
    "adafactor-adam": (optim.Adafactor, optim.Adam, "col_var, row_var, step", ADAM),
}


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "used"])
@pytest.mark.parametrize("name", OTHERS)
def test_another_ones_states_are_refused_by_name(tmp_path: Path, name: str, steps: int) -> None:
    first, then, found, keeps = OTHERS[name]
    save(tmp_path, first)
    net, optimizer = trained(then, steps, seed=1)
    state = {"model": net, "optim": optimizer}
    before, groups = net.weight.detach().clone(), repr(optimizer)
    message = rf"optim: states saved are {found}; those of \w+ are {keeps} \(weight"
    with pytest.raises(StateMismatch, match=message):
        holdfast.load(tmp_path, state)
    assert torch.equal(net.weight, before) and repr(optimizer) == groups
    goes_on = step(*trained(then, steps, seed=1))
    with pytest.warns(HoldfastWarning, match=f"of another optimizer are left out: {message}"):
        holdfast.load(tmp_path, state, strict=False)
    assert step(net, optimizer) != goes_on  # the weights were loaded


def test_one_line_for_all_parameters_that_are_alike(tmp_path: Path) -> None:
    save(tmp_path, optim.AdamW)
    net, optimizer = trained(optim.Adagrad, 0)
    with pytest.raises(StateMismatch) as told:
        holdfast.load(tmp_path, {"model": net, "optim": optimizer})
    (line,) = told.value.problems
    assert line.endswith("(weight and 1 more)")


SAME: dict[str, tuple[Make, Make]] = {
    "adam-adamw": (optim.Adam, optim.AdamW),
    "amsgrad": (lambda p: optim.Adam(p, amsgrad=True), lambda p: optim.Adam(p, amsgrad=True)),
    "amsgrad-is-restored": (lambda p: optim.Adam(p, amsgrad=True), optim.Adam),
    "no-amsgrad-is-restored": (optim.Adam, lambda p: optim.Adam(p, amsgrad=True)),
    "momentum-is-restored": (sgd(0.9), sgd(0)),
    "no-momentum-is-restored": (sgd(0), sgd(0.9)),
    "centered-is-restored": (
        lambda p: optim.RMSprop(p, centered=True, momentum=0.5),
        optim.RMSprop,
    ),
    "tensor-lr": (lambda p: optim.Adam(p, lr=torch.tensor(0.1)), optim.Adam),
}


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "used"])
@pytest.mark.parametrize("name", SAME)
def test_hyper_parameters_of_the_checkpoint_decide(tmp_path: Path, name: str, steps: int) -> None:
    first, then = SAME[name]
    expected = save(tmp_path, first)
    net, optimizer = trained(then, steps, seed=1)
    holdfast.load(tmp_path, {"model": net, "optim": optimizer})
    assert step(net, optimizer) == expected


@pytest.mark.parametrize("name", sorted(ASKED))
def test_each_of_torchs_goes_on_with_its_own(tmp_path: Path, name: str) -> None:
    if name == "Muon":
        MUON.require()

    def make(params: Any) -> optim.Optimizer:
        given = list(params)
        return getattr(optim, name)(given if name != "Muon" else given[:1], lr=0.1)

    expected = save(tmp_path, make)
    net, optimizer = trained(make, 0, seed=1)
    holdfast.load(tmp_path, {"model": net, "optim": optimizer})
    assert step(net, optimizer) == expected


def test_states_that_a_run_has_ceased_to_use_are_kept(tmp_path: Path) -> None:
    net, optimizer = trained(sgd(0.9))
    optimizer.param_groups[0]["momentum"] = 0.0
    step(net, optimizer)
    holdfast.save(tmp_path, {"model": net, "optim": optimizer}, step=1)
    net, optimizer = trained(sgd(0.9), 0)
    holdfast.load(tmp_path, {"model": net, "optim": optimizer})
    assert optimizer.state[net.weight].keys() == {"momentum_buffer"}


def test_what_hooks_keep_with_the_states_is_put_back(tmp_path: Path) -> None:
    """Under names that are no optimizer's of torch: the user's own; told where nothing else is saved."""
    for momentum, num_told in ((0.9, 0), (0.0, 1)):
        net, optimizer = trained(sgd(momentum))
        for p in net.parameters():
            optimizer.state[p]["average"] = p.detach().clone()
        expected = optimizer.state[net.weight]["average"]
        holdfast.save(tmp_path, {"model": net, "optim": optimizer}, step=1)
        net, optimizer = trained(sgd(momentum), 0)
        for expected_num in (num_told, 0):  # then the optimizer has such states
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", HoldfastWarning)
                holdfast.load(tmp_path, {"model": net, "optim": optimizer})
            assert torch.equal(optimizer.state[net.weight]["average"], expected)
            texts = [str(one.message) for one in caught if one.category is HoldfastWarning]
            assert len(texts) == expected_num
            message = "no use for: optim: states saved are average; those of SGD are none"
            assert all(message in text for text in texts)


def test_a_parameter_without_states_has_none_afterwards(tmp_path: Path) -> None:
    save(tmp_path, optim.AdamW, steps=0)
    net, optimizer = trained(optim.AdamW, 2)
    holdfast.load(tmp_path, {"model": net, "optim": optimizer})
    assert not optimizer.state
    net, optimizer = trained(optim.Adagrad, 0)
    if steps_without_states(optim.Adagrad):
        holdfast.load(tmp_path, {"model": net, "optim": optimizer})
        step(net, optimizer)
    else:
        with pytest.raises(StateMismatch, match="saved are none; those of Adagrad are step, sum"):
            holdfast.load(tmp_path, {"model": net, "optim": optimizer})


def steps_without_states(make: Make) -> bool:
    """Whether a step makes the states of a parameter that has none."""
    net, optimizer = trained(make, 0)
    optimizer.state.clear()
    try:
        step(net, optimizer)
    except KeyError:
        return False
    return True


def test_only_some_states_with_which_no_step_could_be_made(tmp_path: Path) -> None:
    save(tmp_path, optim.AdamW)
    net, optimizer = trained(optim.AdamW, 0)
    message = "states saved are exp_avg; those of AdamW are exp_avg, exp_avg_sq, step"
    with pytest.raises(StateMismatch, match=message):
        holdfast.load(tmp_path, {"model": net, "optim": optimizer}, only="optim.*.exp_avg")
    net, optimizer = trained(optim.AdamW, 1)
    holdfast.load(tmp_path, {"model": net, "optim": optimizer}, only="optim.*.exp_avg")
    step(net, optimizer)


def test_of_unknown_classes_the_states_that_are_there_tell(tmp_path: Path) -> None:
    save(tmp_path, Foreign)
    for steps, message in ((0, ""), (1, "states saved are state1, state2; those of Foreign are a")):
        net, optimizer = trained(lambda p: Foreign(p, ("a", "state1")), steps)
        state = {"model": net, "optim": optimizer}
        if message:
            with pytest.raises(StateMismatch, match=message):
                holdfast.load(tmp_path, state)
        else:
            holdfast.load(tmp_path, state)
    for more in (("state1",), ("state1", "state2", "late")):  # one has made other steps
        net, optimizer = trained(lambda p, more=more: Foreign(p, more), 1)
        holdfast.load(tmp_path, {"model": net, "optim": optimizer})


def test_asking_draws_nothing_and_calls_no_hooks() -> None:
    called: list[Any] = []
    hooks = [
        register_optimizer_step_pre_hook(lambda *a: called.append(a)),
        register_optimizer_step_post_hook(lambda *a: called.append(a)),
    ]
    try:
        before = torch.get_rng_state()
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("error")
            for kind in (getattr(optim, name) for name in ASKED if hasattr(optim, name)):
                found = expected_states(kind, {"lr": 0.1}, 2)
                assert found is not None and (found.needed or kind is optim.SGD)
        assert torch.equal(torch.get_rng_state(), before)
    finally:
        for hook in hooks:
            hook.remove()
    assert not called
