"""Values that are no tensors, and the tensors that lie in them."""

from __future__ import annotations

import pickle
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import holdfast
from capabilities import ALONE
from holdfast.dcp import Reader, Writer
from holdfast.errors import UsageError
from holdfast.integrations.dcp.ids import step_of_id
from holdfast.live.saving.writing import WRITE_BYTES

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


def loaded(root: Path) -> dict[str, Any]:
    """All that the newest step has, without a state to load it into."""
    state: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, storage_reader=Reader(root), planner=planner, no_dist=True)
    return state


@pytest.mark.parametrize("is_empty", [False, True])
def test_tensors_in_tuples_have_their_values(tmp_path: Path, is_empty: bool) -> None:
    holdfast.save(tmp_path, {"lstm": held(), "w": N}, step=1)
    if is_empty:
        state = loaded(tmp_path)
    else:
        state = {"lstm": held(), "w": N.clone()}
        for tensor in (state["w"], *state["lstm"]["carry"][:2], state["lstm"]["lists"][0]):
            tensor.zero_()
        dcp.load(state, storage_reader=Reader(tmp_path), **ALONE)
    assert flat(state) == flat({"lstm": held(), "w": N})


@pytest.fixture
def added() -> Iterator[Any]:
    """What the user has declared safe: a class of numpy's arrays, as Megatron-Core does."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals([np.ndarray])
    yield np.ndarray
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(before)


VALUES = {
    "a": [1, 2.5, "b", None, b"bytes", b"", 3 + 4j],
    "n": {"x": np.arange(3.0), "s": np.float32(2), "d": deque(maxlen=2)},
    "e": (torch.ones(2, dtype=torch.bfloat16), torch.float16, {1, 2}, Counter("aab")),
}
EXPECTED = {key: repr(value) for key, value in VALUES.items()}


def test_what_the_user_has_declared_safe_stays(tmp_path: Path, added: Any) -> None:
    """It stays after a save, and during one, though others are at work."""
    before, errors = set(torch.serialization.get_safe_globals()), []

    def save(number: int) -> None:
        try:
            for step in range(10):
                state = {"number": number, **VALUES}
                writer = Writer(tmp_path / str(number))
                dcp.save(state, storage_writer=writer, checkpoint_id=str(step), **ALONE)
                assert set(torch.serialization.get_safe_globals()) == before
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for number in range(2):
        found = loaded(tmp_path / str(number))
        assert found.pop("number") == number
        assert {key: repr(value) for key, value in found.items()} == EXPECTED


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_an_image_that_ends_with_a_block(tmp_path: Path, blocks: int) -> None:
    state = {"w": torch.arange((blocks * WRITE_BYTES - 4096) // 4, dtype=torch.int32)}
    dcp.save(state, storage_writer=Writer(tmp_path), **ALONE)
    (file,) = holdfast.open(tmp_path).manifest.files
    assert file.table == blocks * WRITE_BYTES
    found = {"w": torch.zeros_like(state["w"])}
    dcp.load(found, storage_reader=Reader(tmp_path), **ALONE)
    assert torch.equal(found["w"], state["w"])


@pytest.mark.parametrize(
    "name", ["model-10", "optim_10", "best10", "epoch-10", "10b", "-10", "+10"]
)
def test_an_id_that_may_name_another_thing_than_a_step_is_refused(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="names no step of"):
        Writer(tmp_path).reset(name)


@pytest.mark.parametrize(
    "name", ["10", "step-10", "step10", "global_step10", "iter_0000010", "checkpoint-10", "ckpt_10"]
)
def test_ids_that_name_a_step(name: str, tmp_path: Path) -> None:
    for checkpoint_id in (name, f"{tmp_path}/{name}", tmp_path / name):
        assert step_of_id(checkpoint_id, str(tmp_path)) == 10


def test_memory_of_this_process_is_none_of_the_process_of_async_save() -> None:
    with pytest.raises(UsageError, match="memory of one process"):
        pickle.dumps(Writer("memory://here"))


def test_a_part_that_looks_whole_is_refused(tmp_path: Path) -> None:
    cut = torch.nn.Parameter(torch.zeros(0))
    cut.ds_id = 3  # type: ignore[attr-defined]
    with pytest.raises(CheckpointException, match="ZeRO-3 has partitioned"):
        dcp.save({"w": cut}, storage_writer=Writer(tmp_path), **ALONE)


class Strange:
    """An object that is no plain data."""


@pytest.mark.parametrize("value", [Strange(), Strange, print, [slice(1)]])
def test_what_is_no_plain_data_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(
        CheckpointException, match=r"v: is no plain data \(Unsupported global: GLOBAL"
    ):
        dcp.save({"v": value}, storage_writer=Writer(tmp_path), **ALONE)
    assert not holdfast.steps(tmp_path)
