"""Values that are no tensors, and the tensors that lie in them."""

from __future__ import annotations

from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import holdfast
from holdfast.dcp import Reader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

N = torch.arange(4.0)


def held() -> dict[str, Any]:
    """Tensors in what DCP looks into, and in what it does not."""
    return {
        "carry": (N.clone(), N.view(2, 2) + 1, {"deep": [(N + 2, 3)]}),
        "recent": deque([N + 3, "a"], maxlen=4),
        "lists": [N + 4, (N + 5, [N + 6])],
        "only": [[(N + 7,)], 5],
        "ordered": OrderedDict(a=(N + 8,), b=N[:0], c=(N[:0],)),
        "set": {N + 9},
        "plain": ([1, 2], "b"),
    }


def flat(value: Any) -> Any:
    """A value in which tensors are lists, and sets are lists."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: flat(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, deque, set)):
        return type(value).__name__ if not value else [type(value).__name__, *map(flat, value)]
    return value


@pytest.mark.parametrize("is_empty", [False, True])
def test_tensors_in_tuples_have_their_values(tmp_path: Path, is_empty: bool) -> None:
    holdfast.save(tmp_path, {"lstm": held(), "w": N}, step=1)
    state: dict[str, Any] = {}
    if is_empty:
        planner = _EmptyStateDictLoadPlanner()
        _load_state_dict(state, storage_reader=Reader(tmp_path), planner=planner, no_dist=True)
    else:
        state = {"lstm": held(), "w": N.clone()}
        for tensor in (state["w"], *state["lstm"]["carry"][:2], state["lstm"]["lists"][0]):
            tensor.zero_()
        dcp.load(state, storage_reader=Reader(tmp_path), no_dist=True)
    assert flat(state) == flat({"lstm": held(), "w": N})
