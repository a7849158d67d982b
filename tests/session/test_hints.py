"""What strangers type first, and what they are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import NotFound, RankErrors, UsageError


def state() -> dict[str, Any]:
    return {"x": torch.ones(3)}


def test_a_second_checkpointer_of_this_process_names_the_close_of_the_first(tmp_path: Path) -> None:
    """As of a notebook's cell that is run twice."""
    first = holdfast.Checkpointer(tmp_path, state())
    first.save(1).wait(60)
    second = holdfast.Checkpointer(tmp_path, state())
    second.restore()
    with pytest.raises(
        RankErrors, match="taken over by run 2, another Checkpointer of this"
    ) as caught:
        first.save(2).wait(60)
    assert "while the first one was open; its run 1 stops committing" in str(caught.value)
    assert "hint: call close() on the first one before you make another" in str(caught.value)
    second.save(2).wait(60)
    second.close()
    first.close()
    assert holdfast.steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("name", ["restore", "step", "status", "close"])
def test_a_method_of_a_run_is_not_in_the_package(name: str) -> None:
    with pytest.raises(
        AttributeError, match=rf"it is a method, holdfast\.Checkpointer\(.*\)\.{name}\(\)"
    ):
        getattr(holdfast, name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("checkpointer", "Checkpointer"), ("Chekpointer", "Checkpointer"), ("lod", "load")],
)
def test_a_name_with_a_typo(name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; did you mean .*'{meant}'"):
        getattr(holdfast, name)
    with pytest.raises(AttributeError, match=r"no attribute '_close'$"):
        _ = holdfast._close


def test_a_state_dict_in_the_place_of_a_state(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(UsageError) as caught:
        holdfast.save(tmp_path, model.state_dict(), step=1)
    assert caught.value.hint == (
        "this looks like a state_dict(): hand over the module itself, {'model': model}"
    )
    with pytest.raises(UsageError) as caught:
        holdfast.save(tmp_path, {"a.b": model}, step=1)
    assert caught.value.hint is None


def test_metrics_of_a_step_that_does_not_exist_name_those_that_do(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, state()) as ckpt:
        ckpt.save(4).wait(60)
        with pytest.raises(NotFound, match="no step 7 in") as caught:
            ckpt.metrics(7, loss=0.1)
        assert caught.value.hint == ("steps there: 4; `step(7, metrics={...})` is for one to come")
        with pytest.raises(NotFound, match="no step 7 in") as caught:
            ckpt.pin(7, "best")
        assert caught.value.hint == "steps there: 4"
