"""A warning of holdfast names the line of the user's script, however deep in holdfast it is given."""

from __future__ import annotations

import ast
import linecache
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import HoldfastWarning, warn_user

SRC = Path(holdfast.__file__).parent


@pytest.fixture
def root(tmp_path: Path) -> str:
    """Steps 1 and 2; the manifest of the newest cannot be read."""
    for step in (1, 2):
        holdfast.save(tmp_path / "run", {"w": torch.ones(2), "x": torch.ones(2)}, step=step)
    (tmp_path / "run/steps/0000000002/manifest.json").write_text("{")
    return str(tmp_path / "run")


class Counter(nn.Module):
    """Keeps what no state_dict has."""

    count = 0


def never_saves(root: str) -> None:
    with holdfast.Checkpointer(root, {"w": torch.zeros(2)}, anew=True) as ckpt:
        ckpt.step(1)  # here


def restores(root: str) -> None:
    state = {"w": torch.zeros(2), "x": torch.zeros(2)}
    with holdfast.Checkpointer(root, state, every=1) as ckpt:
        ckpt.restore()  # here


def leaves_out(root: str) -> None:
    state = {"w": torch.zeros(2), "x": torch.zeros(2), "y": torch.zeros(2)}
    holdfast.load(root, state, step=1, strict=False)  # here


def a_step_of_torch_calls_back(root: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.register_step_pre_hook(_of_holdfast(lambda *_: warn_user("in a hook")))
    optimizer.step()  # here


def _of_holdfast(call: Callable[..., None]) -> Callable[..., None]:
    """A function as if it were in holdfast's own files."""
    code = call.__code__.replace(co_filename=str(SRC / "somewhere.py"))
    return type(call)(code, call.__globals__)


CALLS: dict[str, Callable[[str], object]] = {
    "steps": lambda root: holdfast.steps(root),  # here
    "open": lambda root: holdfast.open(root),  # here
    "load": lambda root: holdfast.load(root, {"w": torch.zeros(2), "x": torch.zeros(2)}),  # here
    "save": lambda root: holdfast.save(root, {"m": Counter(), "w": torch.ones(1)}, step=3),  # here
    "load, not strict": leaves_out,
    "Checkpointer.step": never_saves,
    "Checkpointer.restore": restores,
    "a hook of torch": a_step_of_torch_calls_back,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_warning_names_the_line_of_the_script(root: str, name: str) -> None:
    with pytest.warns(HoldfastWarning) as told:
        CALLS[name](root)
    for one in told:
        line = linecache.getline(one.filename, one.lineno)
        assert one.filename == __file__ and line.rstrip().endswith("# here"), (one.message, line)


def test_a_hint_is_told_on_a_line_of_its_own() -> None:
    with pytest.warns(HoldfastWarning, match=r"^it is so\n  hint: do this$"):
        warn_user("it is so", "do this")


def test_a_warning_may_be_an_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(HoldfastWarning, match="it is so"):
            warn_user("it is so")


def test_warnings_are_given_by_one_function() -> None:
    others = [
        f"{path.relative_to(SRC)}:{node.lineno}"
        for path in sorted(SRC.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("warnings.warn")
    ]
    assert {other.split(":")[0] for other in others} == {"base/errors.py"}, others
