"""What is chosen by name and is not there: nothing is loaded, compared or declared for nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.core.checkpoint.diffing import compare_checkpoints
from holdfast.errors import StateMismatch, UsageError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"model": model, "optim": optimizer, "epoch": 3, "loader": {"at": [1, 2]}}
    holdfast.save(tmp_path / "root", state, step=1)
    return tmp_path / "root"


def untouched(root: Path, message: str, **options: Any) -> None:
    """The load is refused with that message, and no weight is another."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(StateMismatch, match=message):
        holdfast.load(root, {"model": model, "epoch": 0}, **options)
    assert all(map(torch.equal, model.parameters(), before))


def test_a_pattern_that_matches_nothing_is_told_with_near_ones(root: Path) -> None:
    untouched(
        root, r"only='modle\.\*' matches no tensor .*did you mean 'model\.\*'", only="modle.*"
    )
    untouched(root, r"did you mean 'model\.1\.\*'", only="modle.1.*")
    untouched(root, r"did you mean 'model\.0\.weight'", only="model.0.wieght")
    untouched(root, r"only='modle\.\*' matches no", only=["model.0.*", "modle.*"])
    untouched(root, r"only='modle\.\*' matches no", only=["model.0.*", "modle.*"], strict=False)


def test_a_pattern_of_a_key_that_was_not_handed_over_loads_nothing(root: Path) -> None:
    untouched(
        root,
        r"only='optim\.\*' .*the state that was handed over has 'epoch', 'model'",
        only="optim.*",
    )


def test_a_pattern_of_what_only_leaves_out_loads_nothing(root: Path) -> None:
    untouched(root, r"only='epoch' matches no tensor that is saved", only=["model.*", "epoch"])


def test_what_is_missing_here_matches_nothing_though_names_may_lack(root: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(StateMismatch, match=r"only='model\.1\.\*' matches no tensor"):
        holdfast.load(root, {"model": model}, only=["model.0.*", "model.1.*"], strict=False)


@pytest.mark.parametrize("only", [[], "", ["model.*", ""], ["model.*", 3], 3])
def test_patterns_that_are_none(root: Path, only: Any) -> None:
    with pytest.raises(UsageError, match=r"must be a pattern of names such as .* or a list"):
        holdfast.load(root, {"model": nn.Linear(3, 3)}, only=only)


def test_a_rule_of_a_key_that_is_not_there(root: Path) -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(UsageError, match=r"no such key\n  hint: did you mean 'loader'"):
        holdfast.load(root, {"model": model, "loader": {}}, on_resize={"loadre": "fresh"})
    with pytest.raises(UsageError, match=r"'loadre': \.\.\.}\): the state has no such key"):
        holdfast.Checkpointer(root, {"model": model, "loader": {}}, on_resize={"loadre": "fresh"})
    rules = {"rng": "fresh", "model": "same"}
    holdfast.Checkpointer(root, {"model": model}, on_resize=rules).close()


def test_a_comparison_of_nothing_is_no_equality(root: Path) -> None:
    with holdfast.open(root) as a, holdfast.open(root) as b:
        with pytest.raises(UsageError, match=r"matches no tensor and no extra .*\n.*'model\.\*'"):
            compare_checkpoints(a, b, only="modle.*")
        for pattern in ("model.*", "epoch", "loader.at*", "optim.param_groups*", "loader.at[[]1]"):
            assert compare_checkpoints(a, b, only=pattern).identical
