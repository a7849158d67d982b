"""The settings of parameter groups after a load: those that were saved, and of the kind that is there."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

import holdfast
from holdfast.errors import HoldfastWarning, UsageError


class Schedule:
    """Writes into the groups while it is loaded, before it has all its own fields back."""

    def __init__(self, optim: torch.optim.Optimizer, lr: float, decay: float) -> None:
        self.optim, self.lr, self.decay, self.count = optim, lr, decay, 0
        self.write()

    def write(self) -> None:
        for group in self.optim.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(self.lr / (1 + self.count))
            else:
                group["lr"] = self.lr / (1 + self.count)
            group["weight_decay"] = self.decay

    def step(self) -> None:
        self.count += 1
        self.write()

    def state_dict(self) -> dict[str, Any]:
        return {"lr": self.lr, "decay": self.decay, "count": self.count}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.lr = saved["lr"]
        self.write()
        self.decay, self.count = saved["decay"], saved["count"]


def build(lr: float, decay: float, order: str, *, tensor: bool = False) -> dict[str, Any]:
    model = nn.Linear(4, 4)
    rate: Any = torch.tensor(0.01) if tensor else 0.01
    optim = torch.optim.AdamW(
        [{"params": [model.weight]}, {"params": [model.bias], "betas": (0.5, 0.6)}], lr=rate
    )
    sched = Schedule(optim, lr, decay)
    names = {"before": ("a_sched", "optim"), "after": ("optim", "sched"), "inside": ("optim", "z")}
    state: dict[str, Any] = {"model": model}
    for name in names[order]:
        state[name] = optim if name == "optim" else {"scheds": [sched]} if name == "z" else sched
    return state


def settings(state: dict[str, Any]) -> list[tuple[float, float]]:
    return [(float(g["lr"]), g["weight_decay"]) for g in state["optim"].param_groups]


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("order", ["before", "after", "inside"])
def test_what_an_object_writes_while_it_is_loaded_is_put_back(
    order: str, tensor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_before = {("sched", "optim"), ("z", "optim")} if tensor else set()
    monkeypatch.setattr("holdfast.live.restore.param_groups._told", told_before)
    url = f"memory://settings-{order}-{tensor}"
    state = build(0.1, 0.2, order, tensor=tensor)
    scheds = [state.get("a_sched"), state.get("sched"), *state.get("z", {"scheds": []})["scheds"]]
    for one in filter(None, scheds):
        one.step()
    holdfast.save(url, state, step=1)
    other = build(0.5, 0.9, order, tensor=tensor)
    rate = other["optim"].param_groups[0]["lr"]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", HoldfastWarning)
        holdfast.load(url, other)
        holdfast.load(url, other)
    assert settings(other) == settings(state)
    assert not tensor or other["optim"].param_groups[0]["lr"] is rate
    texts = [str(w.message) for w in told if w.category is HoldfastWarning]
    assert len(texts) == (order != "before") * (not tensor)  # told once in this process
    for text in texts:
        assert (
            "wrote into the groups of optim while it was loaded: lr of group 0 (0.1, saved as 0.05"
            in text
        )
        assert text.endswith("[settings-put-back]")


class Helper:
    """Resets what it helps when it is loaded."""

    def __init__(self, state: dict[str, Any], *, writes: bool) -> None:
        self.state, self.writes = state, writes

    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if self.writes:
            torch.nn.init.zeros_(self.state["model"].weight)
            self.state["optim"].state.clear()


def test_what_an_object_writes_to_weights_while_it_is_loaded_is_told(tmp_path: Path) -> None:
    def build(*, writes: bool) -> dict[str, Any]:
        state = build_trained()
        state["helper"] = Helper(state, writes=writes)
        return state

    def build_trained() -> dict[str, Any]:
        model = nn.Linear(4, 4)
        optim = torch.optim.Adam(model.parameters())
        model(torch.ones(4)).sum().backward()
        optim.step()
        return {"model": model, "optim": optim}

    holdfast.save(tmp_path, build(writes=False), step=1)
    for writes in (False, True):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", HoldfastWarning)
            holdfast.load(tmp_path, build(writes=writes))
        texts = [str(one.message) for one in told]
        assert len(texts) == writes
    assert "helper wrote to model.weight, optim.state while it was loaded" in texts[0]


class Unfreezing:
    """Adds the last layer to the optimizer, also while it is loaded."""

    def __init__(self, optim: torch.optim.Optimizer, layer: nn.Module) -> None:
        self.optim, self.layer, self.done = optim, layer, False

    def unfreeze(self) -> None:
        self.optim.add_param_group({"params": self.layer.parameters(), "lr": 0.5})
        self.done = True

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if saved["done"] and not self.done:
            self.unfreeze()


def test_a_group_that_is_added_while_an_object_is_loaded_gets_its_settings(tmp_path: Path) -> None:
    def build() -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optim = torch.optim.SGD(model[0].parameters(), lr=0.1)
        return {"model": model, "optim": optim, "a_callback": Unfreezing(optim, model[1])}

    state, again = build(), build()
    state["a_callback"].unfreeze()
    state["optim"].param_groups[1]["lr"] = 0.7
    holdfast.save(tmp_path, state, step=1)
    holdfast.load(tmp_path, again)
    assert [group["lr"] for group in again["optim"].param_groups] == [0.1, 0.7]


def test_from_records(tmp_path: Path) -> None:
    options: Any = {"every": holdfast.Every(durable=3, delta=1), "delta": holdfast.Delta()}

    def train(state: dict[str, Any], ckpt: Any, start: int, stop: int) -> None:
        for i in range(start, stop):
            state["model"](torch.ones(4)).sum().backward()
            state["optim"].step()
            state["optim"].zero_grad()
            state["sched"].step()
            ckpt.step(i)

    torch.manual_seed(0)
    state = build(0.1, 0.2, "after")
    with holdfast.Checkpointer(tmp_path, state, **options) as ckpt:
        train(state, ckpt, 1, 6)
        expected = settings(state)
    other = build(0.5, 0.9, "after")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HoldfastWarning)
        with holdfast.Checkpointer(tmp_path, other, **options) as ckpt:
            assert ckpt.restore() == 5
            assert settings(other) == expected
    assert torch.equal(other["model"].weight, state["model"].weight)


def test_a_module_that_writes_while_it_is_loaded() -> None:
    class Head(nn.Linear):
        optim: Any = None

        def get_extra_state(self) -> float:
            return 0.0

        def set_extra_state(self, state: float) -> None:
            self.optim.param_groups[0]["lr"] = state

    def built(lr: float) -> dict[str, Any]:
        head = Head(2, 2)
        head.optim = torch.optim.SGD(head.parameters(), lr=lr)
        return {"optim": head.optim, "tail": head}

    holdfast.save("memory://writing-module", built(0.5), step=1)
    state = built(0.25)
    with pytest.warns(
        HoldfastWarning, match=r"tail wrote into the groups of optim .*\[settings-put-back\]$"
    ):
        holdfast.load("memory://writing-module", state)
    assert state["optim"].param_groups[0]["lr"] == 0.5


@pytest.mark.filterwarnings("error::holdfast.HoldfastWarning")
def test_what_only_rounds_is_no_matter_and_put_back() -> None:
    class Closed(Schedule):
        def load_state_dict(self, saved: dict[str, Any]) -> None:
            super().load_state_dict(saved)
            for group in self.optim.param_groups:
                group["lr"], group["weight_decay"] = 0.3, 1

    def built() -> dict[str, Any]:
        optim = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        return {"optim": optim, "sched": Closed(optim, 0.1 + 0.2, 1.0)}

    state = built()
    holdfast.save("memory://rounds", state, step=1)
    other = built()
    holdfast.load("memory://rounds", other)
    assert settings(other) == settings(state) == [(0.1 + 0.2, 1.0)]
    assert type(other["optim"].param_groups[0]["weight_decay"]) is float


TORCHS: dict[str, Any] = {
    "lambda": lambda o: lrs.LambdaLR(o, lambda step: 0.9**step),
    "one-cycle": lambda o: lrs.OneCycleLR(o, 1.0, total_steps=30),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.1, 1.0),
    "sequential": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=3), lrs.CosineAnnealingLR(o, 8)], [4]
    ),
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1, factor=0.5),
    "chained": lambda o: lrs.ChainedScheduler([lrs.StepLR(o, 2), lrs.ExponentialLR(o, 0.9)]),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=3),
}


@pytest.mark.parametrize("kind", ["float", "tensor"])
@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.filterwarnings("error::holdfast.HoldfastWarning")
@pytest.mark.filterwarnings("ignore:Detected call", "ignore:The epoch parameter")
def test_schedulers_of_torch_are_never_told_of(name: str, kind: str) -> None:
    """Also where the optimizer was made with other values, and of several optimizers."""

    def built(lr: float) -> tuple[list[Any], list[Any]]:
        rate: Any = torch.tensor(lr) if kind == "tensor" else lr
        sizes = (2, 3)  # which tell the parameters apart
        optims = [torch.optim.SGD([nn.Parameter(torch.ones(n))], rate, 0.9) for n in sizes]
        return optims, [TORCHS[name](one) for one in optims]

    optims, scheds = built(0.5)
    for optim, sched in zip(optims, scheds):
        for i in range(5):
            optim.step()
            sched.step(*((1.0 + i % 3,) if name == "plateau" else ()))
    url = f"memory://torchs-{name}-{kind}"
    if any(map(callable, scheds[0].state_dict().values())):  # a function of SWALR's, in some torch
        with pytest.raises(UsageError, match=r"scheds\.\[0\]\.anneal_func: a .* cannot be saved"):
            holdfast.save(url, {"optims": optims, "scheds": scheds}, step=1)
        return
    holdfast.save(url, {"optims": optims, "scheds": scheds}, step=1)
    others, fresh = built(0.125)
    holdfast.load(url, {"optims": others, "scheds": fresh})
    for one, other in zip(optims, others):
        assert one.param_groups[0]["lr"] == other.param_groups[0]["lr"]


@pytest.mark.parametrize("saved", ["float", "tensor", "double"])
@pytest.mark.parametrize("live", ["float", "tensor"])
def test_a_rate_that_is_a_tensor_is_filled(saved: str, live: str) -> None:
    kinds: dict[str, Any] = {
        "float": float, "tensor": torch.tensor,
        "double": lambda lr: torch.tensor([lr], dtype=torch.float64),
    }  # fmt: skip

    def built(kind: str, lr: float) -> torch.optim.Optimizer:
        params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
        optim = torch.optim.AdamW([{"params": [p]} for p in params])
        rate = kinds[kind](lr)
        for group in optim.param_groups:  # one tensor for both
            group["lr"] = rate
        return optim

    url = f"memory://kind-{saved}-{live}"
    holdfast.save(url, {"optim": built(saved, 0.25)}, step=1)
    optim = built(live, 0.5)
    rate = optim.param_groups[0]["lr"]
    holdfast.load(url, {"optim": optim})
    for group in optim.param_groups:
        assert group["lr"] == 0.25
        assert group["lr"] is rate or live == "float"
        assert isinstance(group["lr"], torch.Tensor) or (saved, live) == ("float", "float")
