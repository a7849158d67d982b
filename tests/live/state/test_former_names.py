"""Checkpoints of versions that left wrappers in names are loaded by the structure of the live model.

They are made here as those versions made them: a plain dict of modules, called as the wrapper's children
are, has the names that the wrapper's had.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import holdfast
from cli.calling import call
from holdfast.errors import StateMismatch

from .test_wrappers import Extra, compiled, fabric, plain

pytestmark = pytest.mark.usefixtures("mesh")

Wrap = Callable[[nn.Module], nn.Module]


class Named(nn.Module):
    """Children by those names."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Extra(2, 2), nn.Linear(2, 2))


def parts(wrap: Wrap, seed: int) -> nn.Module:
    return nn.ModuleDict({"gen": wrap(net(seed)), "module": nn.Linear(2, 2)})


def as_ddp(module: nn.Module) -> nn.Module:
    return Named(module=module)


def as_fabric(module: nn.Module) -> nn.Module:
    return Named(_forward_module=module, _original_module=module)


def as_fabric_ddp(module: nn.Module) -> nn.Module:
    return Named(_forward_module=Named(module=module), _original_module=module)


def trained(model: nn.Module, seed: int, kind: type = torch.optim.Adam) -> dict[str, Any]:
    """A state with moments, groups, a plain state and extras."""
    for m in model.modules():
        if isinstance(m, Extra):
            m.said = str(seed)
    first, *rest = model.parameters()
    optim = kind([{"params": [first], "lr": 0.5 * seed}, {"params": rest}], lr=0.1)
    for p in model.parameters():
        p.grad = torch.full_like(p, seed)
    optim.step()
    for p in model.parameters():
        optim.state[p]["told"] = f"{seed} times"
        optim.state[p]["past"] = [torch.full((2,), float(seed))]
    return {"model": model, "optim": optim}


def values(state: dict[str, Any]) -> list[Any]:
    """All that there is, in an order that does not depend on names."""
    model, optim = state["model"], state["optim"]
    found: list[Any] = [p.tolist() for p in model.parameters()]
    found += [b.tolist() for b in model.buffers()]
    found += [m.said for m in model.modules() if isinstance(m, Extra)]
    for p in model.parameters():
        said = optim.state[p]
        found += [[said[s].tolist() for s in ("exp_avg", "exp_avg_sq", "step")]]
        found += [said["told"], [t.tolist() for t in said["past"]]]
    return found + [g["lr"] for g in optim.param_groups]


NOW_WITHOUT = "fabric, and now without"
MODELS: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], nn.Module]]] = {
    "ddp inside": (lambda s: parts(as_ddp, s), lambda s: parts(DDP, s)),
    "dataparallel inside": (lambda s: parts(as_ddp, s), lambda s: parts(nn.DataParallel, s)),
    "compiled inside ddp": (
        lambda s: parts(as_ddp, s),
        lambda s: parts(lambda m: DDP(compiled(m)), s),
    ),
    "fabric": (lambda s: as_fabric_ddp(net(s)), lambda s: fabric(net(s))),
    "fabric on another number of ranks": (
        lambda s: as_fabric(net(s)),
        lambda s: fabric(net(s)),
    ),
    "fabric inside": (lambda s: parts(as_fabric_ddp, s), lambda s: parts(fabric, s)),
    NOW_WITHOUT: (lambda s: as_fabric_ddp(net(s)), net),
}


MARKED = [
    pytest.param(n, marks=pytest.mark.soak if "fabric" in n and n != NOW_WITHOUT else ())
    for n in MODELS
]


@pytest.mark.parametrize("name", MARKED)
def test_former_names_are_found_by_structure(tmp_path: Path, name: str) -> None:
    former, live = MODELS[name]
    saved = trained(former(1), 1)
    holdfast.save(tmp_path, saved, step=1)
    with holdfast.open(tmp_path) as found:
        assert all("module." in n for n in found.names() if ".module." not in f".{n}")
    state = trained(live(2), 2)
    assert values(state) != values(saved)
    assert holdfast.load(tmp_path, state) == 1
    assert values(state) == values(saved)


@pytest.mark.parametrize("strict", [True, False])
def test_weights_alone_and_by_pattern(tmp_path: Path, strict: bool) -> None:
    """`only` goes by the live names."""
    saved = trained(parts(as_ddp, 1), 1)
    holdfast.save(tmp_path, saved, step=1)
    model = parts(DDP, 2)
    before = model["module"].weight.clone()
    holdfast.load(tmp_path, {"model": model}, only="model.gen.*", strict=strict)
    assert torch.equal(model["gen"].module[1].weight, saved["model"]["gen"].module[1].weight)
    assert torch.equal(model["module"].weight, before)
    holdfast.load(tmp_path, {"model": model}, strict=strict)
    assert torch.equal(model["module"].weight, saved["model"]["module"].weight)


def test_two_models_of_one_optimizer(tmp_path: Path) -> None:
    """Two names become one without the wrapper, so that both get the keys of their models."""

    def state(wrap: Wrap, seed: int) -> dict[str, Any]:
        a = nn.ModuleDict({"x": wrap(nn.Linear(2, 2))})
        b = nn.ModuleDict({"x": nn.Linear(2, 2)})
        found = trained(nn.ModuleList([a, b]), seed)
        return {"a": a, "b": b, "optim": found["optim"]}

    def said(of: dict[str, Any]) -> list[Any]:
        both = nn.ModuleList([of["a"], of["b"]])
        return values({"model": both, "optim": of["optim"]})

    saved, live = state(as_ddp, 1), state(DDP, 2)
    holdfast.save(tmp_path, saved, step=1)
    with holdfast.open(tmp_path) as found:
        assert {"optim.x.module.weight.exp_avg", "optim.x.weight.exp_avg"} <= set(found.names())
    holdfast.load(tmp_path, live)
    assert said(live) == said(saved)


def test_a_users_own_module_of_that_name_is_none(tmp_path: Path) -> None:
    """Only what the live structure says is renamed."""
    holdfast.save(tmp_path, {"model": parts(as_ddp, 1)}, step=1)
    with pytest.raises(StateMismatch, match=r"missing in the checkpoint: model\.gen\.0\.weight"):
        holdfast.load(tmp_path, {"model": parts(plain, 2)})
    holdfast.save(tmp_path / "b", {"model": parts(DDP, 1)}, step=1)
    with pytest.raises(
        StateMismatch, match=r"missing in the checkpoint: model.gen.module.0.weight"
    ):
        holdfast.load(tmp_path / "b", {"model": parts(as_ddp, 2)})


def average(module: nn.Module) -> nn.Module:
    """A model that no optimizer has."""
    return module.requires_grad_(False)


def run(root: Path, wrap: Wrap, around: Wrap, step: int) -> tuple[Any, dict[str, Any]]:
    """A training with an average of its weights, restored; `wrap` and `around` are inside of the two."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"gen": wrap(nn.Linear(2, 2))})
    state = {
        "model": model,
        "ema": average(nn.ModuleDict({"gen": around(nn.Linear(2, 2))})),
        "optim": torch.optim.Adam(model.parameters()),
    }
    every = holdfast.Every(durable=1000, delta=1)
    ckpt = holdfast.Checkpointer(root, state, every=every, delta=holdfast.Delta())
    assert ckpt.restore() == step
    return ckpt, state


def train(ckpt: holdfast.Checkpointer, state: dict[str, Any], until: int) -> None:
    for step in range(1, until + 1):
        for p in state["model"].parameters():
            p.grad = torch.ones_like(p)
        state["optim"].step()
        with torch.no_grad():
            for p, q in zip(state["ema"].parameters(), state["model"].parameters()):
                p.lerp_(q, 0.5)
        ckpt.step(step)


def weights(state: dict[str, Any]) -> list[Any]:
    return [p.tolist() for name in ("model", "ema") for p in state[name].parameters()]


@pytest.mark.parametrize("which", ["trained", "averaged"])
def test_records_under_former_names_are_not_lost_in_silence(tmp_path: Path, which: str) -> None:
    """They are refused, and what is to be done is said; it is done."""

    def both(wrap: Wrap) -> tuple[Wrap, Wrap]:
        return (wrap, plain) if which == "trained" else (plain, wrap)

    ckpt, state = run(tmp_path / "a", *both(as_ddp), 0)
    with ckpt:
        train(ckpt, state, 4)
    assert max(holdfast.steps(tmp_path / "a")) < 4
    with pytest.raises(StateMismatch, match="holdfast replay") as error:
        run(tmp_path / "a", *both(nn.DataParallel), 4)
    command = str(error.value).split("`")[1].replace("DST", str(tmp_path / "b"))
    assert call(*command.split()[1:])[0] == 0
    ckpt, live = run(tmp_path / "b", *both(nn.DataParallel), 4)
    ckpt.close()
    assert weights(live) == weights(state)
