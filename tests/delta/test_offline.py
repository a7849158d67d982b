"""`holdfast log` and `holdfast replay`: what is recorded, and any of it as a full step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import holdfast
from holdfast.cli.main import app

from .test_damage import segment
from .test_exact import (
    OPTIMIZERS,
    Mastered,
    Run,
    check_equal,
    forget,
    recorded,
    root,  # noqa: F401
)

pytestmark = pytest.mark.slow


class Plain(Run):
    """Without tensors of the script's own."""

    def __init__(self, name: str = "adamw") -> None:
        super().__init__(OPTIMIZERS[name])
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
    result = CliRunner().invoke(app, [str(a) for a in args])
    return result.exit_code, result.output


@pytest.mark.parametrize("name", ["adamw", "adamw-two-groups", "momentum"])
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


def test_masters_that_only_the_optimizer_has(root: Path) -> None:  # noqa: F811
    recorded(root, PlainMastered, 5)
    forget(root, 4)
    status, text = call("replay", root, root / "full", "--to", 3)
    assert status == 0, text
    run, plain = PlainMastered(), PlainMastered()
    for number in (1, 2, 3):
        plain.step(number)
    expected = plain.everything()
    assert holdfast.load(str(root / "full"), run.state) == 3
    check_equal(run.everything(), expected)


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


def test_what_is_not_there(root: Path) -> None:  # noqa: F811
    recorded(root, Plain, 5)
    status, text = call("replay", root, root / "full", "--to", 9)
    assert status == 1
    assert "lead to step 9" in text and "recorded: 2 to 5" in text
    status, text = call("replay", root, root, "--to", 4)
    assert status == 1
    assert "already" in text
    status, text = call("log", root / "nothing")
    assert (status, "no records" in text) == (0, True)


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
