"""Values of optimizers that are another on each rank, on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import RuleError

from .cases import Case, check, run_module
from .own_values_cases import (
    CASES,
    ON_THREE,
    Assigned,
    Averages,
    Dealing,
    Dealt,
    built,
    check_averages,
    contents,
    whole,
)

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own_values")


@pytest.fixture(scope="module")
def failed(out: Path) -> dict[str, list[str]]:
    return run_module("own_values_cases", 2, out)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_values_of_each_rank(failed: dict[str, list[str]], case: Case) -> None:
    check(failed, case.__name__)


def test_sharded_tensors_of_an_object_on_one_rank(out: Path, failed: dict[str, list[str]]) -> None:
    """Its own rule makes one state of those of two ranks, which have the same tensors."""
    check(failed, "sharded_tensors_beside_values_of_each_rank")
    model, expected = built("whole", 1)[0], built("whole", 0)[0]
    mine = Averages(model, 0)
    mine.on_resize = "redistribute"
    path = out / "sharded_tensors_beside_values_of_each_rank" / "ruled"
    holdfast.load(path, {"model": model, "mine": mine})
    assert mine.number == 3
    assert mine.shadow == {name: whole(p.detach()) for name, p in expected.named_parameters()}


def test_a_dict_of_the_scripts_redistributes(out: Path, failed: dict[str, list[str]]) -> None:
    """It gets the states of all ranks, with the tensors that they have in common."""
    check(failed, "plain_values_of_each_rank")
    mine = Dealt(left=[], kept=torch.zeros(2))
    path = out / "plain_values_of_each_rank"
    holdfast.load(path, {"mine": mine}, on_resize={"mine": "redistribute"})
    assert mine["left"] == [0, 10, 1, 11] and mine["kept"].tolist() == [1, 1]
    plain = {"mine": {"left": [], "kept": torch.zeros(2)}}
    with pytest.raises(RuleError, match="'mine' has no method redistribute"):
        holdfast.load(path, plain, on_resize={"mine": "redistribute"})


@pytest.mark.parametrize("rule", ["rank0", "same"])
def test_none_of_the_first_rank_is_a_value(
    rule: str, out: Path, failed: dict[str, list[str]]
) -> None:
    """Every rank gets it by its rule, and `find` shows it."""
    check(failed, "plain_values_of_each_rank")
    state: dict[str, Any] = {"best": 0.25}
    path, rules = out / "plain_values_of_each_rank", {"best": rule, "mine": "fresh"}
    with holdfast.Checkpointer(path, on_resize=rules) as ckpt:
        found = ckpt.find()
    assert found is not None and found.extras == {"best": None} and not found.undecided
    holdfast.load(path, state, on_resize={"best": rule})
    assert state == {"best": None}


def test_an_optimizer_is_never_asked_to_redistribute(
    out: Path, failed: dict[str, list[str]]
) -> None:
    """Whatever methods its class has: its values are refused before anything is written."""
    check(failed, "each_rank_gets_its_own_values_back")
    model, optimizer = built("whole", 1, Dealing)
    before = contents(model, optimizer)
    path, rule = out / "each_rank_gets_its_own_values_back", {"optim": "redistribute"}
    with pytest.raises(RuleError, match="'optim' is of kind optimizer"):
        holdfast.load(path, {"model": model, "optim": optimizer}, on_resize=rule)
    assert contents(model, optimizer) == before


@pytest.mark.soak
def test_averages_on_other_numbers_of_ranks(out: Path, failed: dict[str, list[str]]) -> None:
    """Three, and one whose model is not sharded."""
    case = "sharded_tensors_of_an_object_come_back_as_they_were"
    check(failed, case)
    (on_three,) = ON_THREE
    check(run_module("own_values_cases", 3, out), on_three.__name__)
    model, expected = built("whole", 1)[0], built("whole", 0)[0]
    mine = Assigned(model, 0)
    holdfast.load(out / case / "here", {"mine": mine})
    check_averages(mine, model, {n: whole(p.detach()) for n, p in expected.named_parameters()})
