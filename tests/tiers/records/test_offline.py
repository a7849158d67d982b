"""`holdfast log` and `holdfast replay`: what is recorded, and any of it as a full step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from cli import calling
from holdfast.errors import HoldfastWarning, NotFound, StateMismatch
from holdfast.tiers.records import planning
from holdfast.tiers.records.segment import SegmentHeader

from .test_damage import segment
from .test_exact import (
    OPTIMIZERS,
    Mastered,
    Run,
    check_equal,
    equal,
    forget,
    recorded,
    root,  # noqa: F401
)

pytestmark = pytest.mark.slow


class Plain(Run):
    """Without tensors of the script's own."""

    def __init__(self, name: str = "adamw") -> None:
        super().__init__((OPTIMIZERS | MORE)[name])
        del self.told["mean"]

    def step(self, number: int) -> None:
        self.told["mean"] = torch.zeros(3)
        super().step(number)
        del self.told["mean"]


class PlainMastered(Mastered):
    """As `Plain`, of a bfloat16 model with float32 masters."""

    def __init__(self) -> None:
        super().__init__(OPTIMIZERS["adamw"], torch.bfloat16)
        del self.told["mean"]


def call(*args: object) -> tuple[int, str]:
    code, out, err = calling.call(*args)
    return code, out + err


def foreach(kind: Any) -> Any:
    return lambda p: kind(p, foreach=True)


MORE = {
    f"{kind.__name__.lower()}-foreach": foreach(kind)
    for kind in (torch.optim.RAdam, torch.optim.NAdam, torch.optim.ASGD, torch.optim.Adafactor)
}
"""Whose loops compute otherwise, in the last bits."""


@pytest.mark.soak_except("adamw-two-groups", "momentum")
@pytest.mark.parametrize(
    "name",
    ["adamw", "adamw-two-groups", "momentum", "adam-fused", "sgd-fused", "adagrad-fused", *MORE],
)
def test_any_recorded_step_becomes_a_full_one(
    root: Path,  # noqa: F811
    name: str,
) -> None:
    """Loaded by the training script it is what the uninterrupted run had."""

    def new() -> Plain:
        return Plain(name)

    recorded(root, new, 5)
    forget(root, 4)
    status, text = call("replay", root, root / "full", "--to", 3)
    assert (status, text.split(",")[0]) == (0, "step 3: 2 steps replayed from step 1")
    run, plain = new(), new()
    for number in (1, 2, 3):
        plain.step(number)
    expected = plain.everything()
    assert holdfast.load(str(root / "full"), run.state) == 3
    found = run.everything()
    differ = [k for k in expected if not _same(expected[k], found[k])]
    assert differ == []
    assert torch.equal(_rng(root / "full"), expected["rng"])


def replayed(root: Path, new: Callable[[], Any], to: int) -> Any:  # noqa: F811
    """Trained for five steps, and loaded from what `holdfast replay` has made of one of them."""
    recorded(root, new, 5)
    forget(root, 4)
    status, text = call("replay", root, root / "full", "--to", to)
    assert status == 0, text
    run = new()
    assert holdfast.load(str(root / "full"), run.state) == to
    return run


def test_masters_that_only_the_optimizer_has(root: Path) -> None:  # noqa: F811
    run, plain = replayed(root, PlainMastered, 3), PlainMastered()
    for number in (1, 2, 3):
        plain.step(number)
    check_equal(run.everything(), plain.everything())


class Resting(Plain):
    """Of two optimizers one makes no step before the fourth, though it has states by then."""

    def __init__(self) -> None:
        super().__init__()
        self.other = torch.optim.AdamW(self.model.last.parameters(), lr=0.1)
        self.state["other"] = self.other

    def step(self, number: int) -> None:
        super().step(number)
        if number in (1, 4, 5):
            self.other.step()


@pytest.mark.parametrize("to", [3, 5])
def test_an_optimizer_that_rests(root: Path, to: int) -> None:  # noqa: F811
    run, plain = replayed(root, Resting, to), Resting()
    for number in range(1, to + 1):
        plain.step(number)
    assert equal(run.everything(), plain.everything())
    assert equal(run.other.state_dict(), plain.other.state_dict())


class Scaled(nn.Linear):
    """With a state of its own, as modules of FP8 have."""

    scale = 0.0

    def get_extra_state(self) -> Any:
        return {"scale": self.scale}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]


class WithExtra(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.model.frozen = Scaled(16, 16)
        self.model.frozen.requires_grad_(False)

    def step(self, number: int) -> None:
        super().step(number)
        self.model.frozen.scale = float(number)  # type: ignore[assignment]

    def everything(self) -> dict[str, Any]:
        return {}


def test_states_of_modules(root: Path) -> None:  # noqa: F811
    run = replayed(root, WithExtra, 3)
    assert run.model.frozen.scale == 3.0


class Bare(Plain):
    """With a tensor that is a value of the state itself."""

    def __init__(self) -> None:
        super().__init__()
        self.state["bare"] = torch.zeros(5)  # type: ignore[assignment]

    def step(self, number: int) -> None:
        super().step(number)
        self.state["bare"] += 1  # type: ignore[operator]


def test_a_tensor_that_is_a_value_of_the_state(root: Path) -> None:  # noqa: F811
    run = replayed(root, Bare, 3)
    assert torch.equal(run.state["bare"], torch.full((5,), 3.0))


def test_tensors_of_the_scripts_own(root: Path) -> None:  # noqa: F811
    """Refused, and told where it can be done."""
    recorded(root, lambda: Run(OPTIMIZERS["adamw"]), 3)
    status, text = call("replay", root, root / "full", "--to", 3)
    assert status == 1
    assert "'told' has tensors of the script's own" in text
    assert "Checkpointer.restore(step)" in text


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def _rng(root: Path) -> torch.Tensor:  # noqa: F811
    state = holdfast.Rng()
    torch.manual_seed(0)
    holdfast.load(str(root), {"rng": state}, strict=False)
    return torch.get_rng_state()


def test_what_is_recorded(root: Path) -> None:  # noqa: F811
    recorded(root, Plain, 5)
    status, text = call("log", root, "--json")
    (one,) = json.loads(text)["records"]
    assert status == 0
    assert (one["run"], one["first"], one["last"], one["ranks"]) == (1, 2, 5, 1)
    assert (one["parent"], one["base"]) == ([1, 1], 4)
    status, text = call("log", root)
    assert "2 to 5" in text and "step 4" in text
    segment(root, 3).write_bytes(b"nothing")
    forget(root, 4)
    status, text = call("log", root)
    assert status == 1
    assert "nowhere" in text and "damaged" in text


def test_records_up_to_the_newest_full_step(root: Path) -> None:  # noqa: F811
    """Nothing leads to them any more, and nothing is lost with them."""
    recorded(root, Plain, 4)
    forget(root, 1)
    status, text = call("log", root)
    assert status == 0 and "nowhere: history" in text


def test_what_is_not_there(root: Path) -> None:  # noqa: F811
    recorded(root, Plain, 5)
    status, text = call("replay", root, root / "full", "--to", 9)
    assert status == 1
    assert "lead to step 9" in text and "recorded: 2 to 5" in text
    status, text = call("replay", root, root, "--to", 4)
    assert status == 1
    assert "already" in text
    status, text = call("log", root / "nothing")
    assert (status, "nothing" in text) == (1, True)


def test_an_optimizer_that_only_the_script_knows(
    root: Path,  # noqa: F811
) -> None:
    class Own(torch.optim.SGD):
        pass

    class Script(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.optim = Own(self.model.parameters(), lr=0.1)
            self.state["optim"] = self.optim
            self.sched = torch.optim.lr_scheduler.ExponentialLR(self.optim, 0.8)
            self.state["sched"] = self.sched

    recorded(root, Script, 3)
    status, text = call("replay", root, root / "full", "--to", 3)
    assert status == 2
    assert "without the training script" in text


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


class Two:
    """Modules of the same parameter names, each trained by an optimizer of its own."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.modules = {"gen": net(), "disc": net()}
        self.optims = {
            f"optim_{key}": torch.optim.Adam(m.parameters(), 0.01)
            for key, m in self.modules.items()
        }
        self.state: dict[str, Any] = {**self.modules, **self.optims}

    def step(self, number: int) -> None:
        for (key, optim), module in zip(self.optims.items(), self.modules.values()):
            if key == "optim_disc" or number % 2:
                optim.zero_grad()
                module(torch.randn(8, 4)).square().mean().backward()
                optim.step()

    def everything(self) -> dict[str, Any]:
        return {
            f"{key}.{name}": p
            for key in self.modules
            for name, p in _params(self.state[key]).items()
        }


class Averaged(Two):
    """With an average of the weights, which comes before them."""

    def __init__(self) -> None:
        super().__init__()
        del self.modules["disc"], self.optims["optim_disc"]
        self.modules = {"ema": net().requires_grad_(False), **self.modules}
        self.state = {**self.modules, **self.optims}

    def step(self, number: int) -> None:
        optim, model = self.state["optim_gen"], self.modules["gen"]
        optim.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optim.step()
        with torch.no_grad():
            for a, p in zip(self.modules["ema"].parameters(), model.parameters()):
                a.lerp_(p, 0.1)


def _params(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in module.named_parameters()}


def made(root: Path, new: Any, last: int) -> None:  # noqa: F811
    run = new()
    every = holdfast.Every(delta=1)
    with holdfast.Checkpointer(root, run.state, every=every, delta=holdfast.Delta()) as ckpt:
        for number in range(1, last + 1):
            run.step(number)
            ckpt.step(number)


@pytest.mark.parametrize("new", [Two, Averaged])
def test_modules_of_the_same_parameter_names(root: Path, new: Any) -> None:  # noqa: F811
    """Each gets its own gradients."""
    made(root, new, 5)
    status, text = call("replay", root, root / "full", "--to", 5)
    assert status == 0, text
    run, plain = new(), new()
    for number in range(1, 6):
        plain.step(number)
    assert holdfast.load(str(root / "full"), run.state) == 5
    check_equal(run.everything(), plain.everything())


@pytest.mark.parametrize("new", [Two, Averaged])
def test_older_records_that_do_not_say_which_module(
    root: Path,  # noqa: F811
    new: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning, "SegmentHeader", lambda *args, modules: SegmentHeader(*args))
    made(root, new, 3)
    status, text = call("replay", root, root / "full", "--to", 3)
    assert status == 2
    assert "do not say which parameter '0.weight' is" in text
    assert "Checkpointer.restore(step)" in text


def test_a_parameter_of_two_modules(root: Path) -> None:  # noqa: F811
    """Refused: made from the full step, they would not share it."""

    class Shared(Averaged):
        def __init__(self) -> None:
            super().__init__()
            self.modules["ema"][0].weight = self.modules["gen"][0].weight  # type: ignore[index]

        def step(self, number: int) -> None:
            Two.step(self, 1)

    made(root, Shared, 3)
    status, text = call("replay", root, root / "full", "--to", 3)
    assert status == 2
    assert "'gen.0.weight' is a parameter of several modules" in text


def test_a_run_that_begins_with_another_is_told_of_its_records(
    root: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """It begins with the newest full step; what it was told to do gives the rest."""
    recorded(root, Plain, 6)
    what = "its records, up to step 6, are not used"
    with (
        holdfast.Checkpointer(tmp_path / "a", Plain().state) as ckpt,
        pytest.warns(HoldfastWarning, match=what) as told,
    ):
        assert ckpt.restore(source=root) == 4
    assert f"`holdfast replay {root} DST --to 6`" in str(told[0].message)
    with (
        holdfast.Checkpointer(tmp_path / "b", Plain().state) as ckpt,
        pytest.raises(NotFound, match="no step 5") as refused,
    ):
        ckpt.restore(5, source=root)
    assert f"`holdfast replay file://{root} DST --to 5`" in str(refused.value)
    assert call("replay", root, root / "full", "--to", 6)[0] == 0
    with holdfast.Checkpointer(tmp_path / "c", Plain().state) as ckpt:
        assert ckpt.restore(source=root / "full") == 6


def test_full_steps_and_records_of_before_are_nothing_to_be_told(
    root: Path,  # noqa: F811
    tmp_path: Path,
    recwarn: pytest.WarningsRecorder,
) -> None:
    recorded(root, Plain, 4)
    for number, step in enumerate((None, 1)):
        with holdfast.Checkpointer(tmp_path / str(number), Plain().state) as ckpt:
            assert ckpt.restore(step, source=root) == (step or 4)
    with pytest.raises(NotFound) as refused:
        holdfast.load(root, Plain().state, step=9)
    assert refused.value.hint is None
    assert not [w for w in recwarn if issubclass(w.category, HoldfastWarning)]


class AlikeMastered(PlainMastered):
    """Two masters of one shape that only the optimizer has, without names."""

    named = False

    def __init__(self) -> None:
        super().__init__()
        self.more = [torch.nn.Parameter(torch.full((3,), float(n))) for n in (1, 2)]
        pairs: Any = list(zip(("one", "other"), self.more)) if self.named else self.more
        self.others = torch.optim.SGD(pairs, lr=0.1, momentum=0.9)
        self.state["others"] = self.others

    def step(self, number: int) -> None:
        super().step(number)
        for n, p in enumerate(self.more):
            p.grad = torch.full_like(p, number + 10.0 * n)
        self.others.step()


class NamedMastered(AlikeMastered):
    """With names."""

    named = True


def test_masters_that_the_optimizer_names(root: Path) -> None:  # noqa: F811
    run, plain = replayed(root, NamedMastered, 3), NamedMastered()
    for number in (1, 2, 3):
        plain.step(number)
    check_equal(run.everything(), plain.everything())
    assert all(map(torch.equal, run.more, plain.more))


def test_masters_that_nothing_names_are_replayed_in_their_order(root: Path) -> None:  # noqa: F811
    """By the command, which makes the optimizer as it was; whether a script does, it cannot know."""
    with (
        pytest.warns(HoldfastWarning, match=r"\[positions\]"),
        pytest.raises(StateMismatch, match=r"others: nothing names these parameters"),
    ):
        replayed(root, AlikeMastered, 3)
    run, plain = AlikeMastered(), AlikeMastered()
    with pytest.warns(HoldfastWarning, match=r"in their order \[positions\]"):
        holdfast.load(str(root / "full"), run.state, strict=False)
    for number in (1, 2, 3):
        plain.step(number)
    assert all(map(torch.equal, run.more, plain.more))
