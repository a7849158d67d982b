"""Containers of the state that the script holds by names of its own are filled where they are."""

from __future__ import annotations

import io
import warnings
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import HoldfastWarning, StateMismatch

pytestmark = pytest.mark.filterwarnings("error::holdfast.HoldfastWarning")

CONTAINERS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "list": (lambda: [1, [2]], lambda: [0]),
    "dict": (lambda: {"a": 1, 3: [2]}, lambda: {"b": 0}),
    "ordered": (lambda: OrderedDict(b=1, a=2), lambda: OrderedDict(a=5)),
    "counter": (lambda: Counter("aab"), lambda: Counter("xy")),
    "default": (lambda: defaultdict(list, a=[1]), lambda: defaultdict(list)),
    "user dict": (lambda: UserDict(a=[1]), lambda: UserDict()),
    "chain map": (lambda: ChainMap({"a": [1]}), lambda: ChainMap({"b": 0})),
    "set": (lambda: {1, 2}, lambda: {7}),
    "deque": (lambda: deque([1, 2, 3], maxlen=4), lambda: deque([9], maxlen=4)),
    "array": (lambda: np.arange(4.0).reshape(2, 2), lambda: np.zeros((2, 2))),
    "column": (lambda: np.arange(4), lambda: np.zeros((4, 2), dtype=int)[:, 0]),
    "number": (lambda: np.array(4), lambda: np.array(0)),
    "bytes": (lambda: bytearray(b"xyz"), lambda: bytearray()),
    "file": (lambda: io.BytesIO(b"0.5"), lambda: io.BytesIO(b"more than that")),
}
WRAPPED: dict[str, Callable[[Any], Any]] = {
    "value": lambda v: v,
    "in a dict": lambda v: {"progress": v, "n": 1},
    "in a list": lambda v: ["x", v],
    "in a tuple": lambda v: (1.5, v),
    "in a deque": lambda v: deque([v]),
    "deep": lambda v: {"a": [{"b": ({3: [v]},)}]},
}


def plain(value: Any) -> Any:
    if isinstance(value, io.BytesIO):
        return value.getvalue(), value.tell()
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("where", WRAPPED)
@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_container_is_filled_where_it_is(
    kind: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.live.restore.filling._restored_dicts", {"state"})  # told before
    saved, fresh = CONTAINERS[kind]
    url = f"memory://filled-{kind}-{where}".replace(" ", "-")
    holdfast.save(url, {"state": WRAPPED[where](saved())}, step=1)
    mine = fresh()
    state = {"state": WRAPPED[where](mine)}
    holdfast.load(url, state)
    assert plain(mine) == plain(saved())
    holder: Any = state["state"]
    while holder is not mine:  # whatever way leads to it
        inside = holder.values() if isinstance(holder, dict) else holder
        holder = next(
            one for one in inside if isinstance(one, (list, dict, tuple, deque)) or one is mine
        )
    if kind == "deque":
        assert mine.maxlen == 4
    if kind == "default":
        assert mine["new"] == []


def build() -> dict[str, Any]:
    losses: list[float] = []
    model = nn.Linear(2, 2)
    return {
        "model": model,
        "optim": torch.optim.SGD(model.parameters(), lr=0.1),
        "progress": {"losses": losses, "seen": [set(), {"hist": np.zeros(3)}]},
    }


def train(state: dict[str, Any], ckpt: holdfast.Checkpointer, start: int, stop: int) -> None:
    losses, (seen, inner) = state["progress"]["losses"], state["progress"]["seen"]
    hist = inner["hist"]
    for i in range(start, stop):
        state["model"](torch.ones(2)).sum().backward()
        state["optim"].step()
        losses.append(float(i))
        seen.add(i)
        hist[i % 3] += i
        ckpt.step(i)


@pytest.mark.parametrize("tier", ["durable", "records"])
def test_a_loop_goes_on_with_what_it_holds(tmp_path: Path, tier: str) -> None:
    options: dict[str, Any] = {"every": 1}
    if tier == "records":
        options = {"every": holdfast.Every(durable=4, delta=1), "delta": holdfast.Delta()}
    state = build()
    with holdfast.Checkpointer(tmp_path, state, **options) as ckpt:
        ckpt.restore()
        train(state, ckpt, 1, 6)
    check_that_it_goes_on(lambda state: holdfast.Checkpointer(tmp_path, state, **options))


def check_that_it_goes_on(begin: Callable[[dict[str, Any]], holdfast.Checkpointer]) -> None:
    """From the step after the fifth, with the containers that the loop holds."""
    state = build()
    losses, (seen, inner) = state["progress"]["losses"], state["progress"]["seen"]
    hist = inner["hist"]
    with begin(state) as ckpt:
        first = int(ckpt.restore())
        assert first == 5
        train(state, ckpt, first + 1, 8)
    assert losses == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert seen == {1, 2, 3, 4, 5, 6, 7}
    assert hist.tolist() == [9.0, 12.0, 7.0]
    assert state["progress"]["losses"] is losses and inner["hist"] is hist


REPLACED: dict[str, tuple[Any, Callable[[], Any], str]] = {
    "a tuple": ((1, 2), lambda: [0], "a tuple in place of a list"),
    "nothing": (None, lambda: {"a": 1}, "None in place of a dict"),
    "a frozenset": (frozenset({1}), lambda: {2}, "a frozenset in place of a set"),
    "another shape": (np.ones(3), lambda: np.zeros(2), r"float64 \[3\] in place of .* \[2\]"),
    "another dtype": (np.ones(2), lambda: np.zeros(2, "i4"), "float64 .* in place of .* int32"),
    "a longer deque": (deque([1, 2, 3], maxlen=5), lambda: deque(maxlen=2), "at most 2"),
    "a map below": ({"a": 1}, lambda: ChainMap({}, {"b": 2}), "a dict in place of a ChainMap"),
    "a frozen dict": ({"a": 1}, lambda: MappingProxyType({}), "a dict in place of a mappingproxy"),
    "a Counter": (Counter("aa"), dict, "a Counter in place of a dict"),
}


@pytest.mark.parametrize("what", REPLACED)
def test_what_cannot_be_filled_is_told_by_name(what: str) -> None:
    saved, fresh, words = REPLACED[what]
    url = f"memory://replaced-{what.replace(' ', '-')}"
    holdfast.save(url, {"s": {what: [saved]}}, step=1)
    state = {"s": {what: [fresh()]}}
    with pytest.warns(HoldfastWarning, match=rf"s\.{what}\[0\] \(.*{words}.*\[replaced\]$"):
        holdfast.load(url, state)
    assert plain(state["s"][what][0]) == plain(saved)
    state["s"][what][0] = fresh()
    holdfast.load(url, state)  # told once


def test_a_read_only_array_is_replaced() -> None:
    holdfast.save("memory://read-only", {"s": {"locked": np.ones(2)}}, step=1)
    live = np.zeros(2)
    live.setflags(write=False)
    with pytest.warns(HoldfastWarning, match=r"s\.locked"):
        holdfast.load("memory://read-only", {"s": {"locked": live}})


def test_placeholders_are_no_matter() -> None:
    """Numbers, texts, None, and arrays without elements: nobody can hold them and see them change."""
    saved = {"a": [1], "b": np.ones(3), "c": {"x": 1}, "d": "text", "e": (1, 2)}
    holdfast.save("memory://placeholders", {"s": saved}, step=1)
    state = {"s": {"a": None, "b": np.zeros(0), "c": None, "d": None, "e": ()}}
    holdfast.load("memory://placeholders", state)
    assert state["s"]["a"] == [1] and state["s"]["b"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("where", ["two keys", "one value"])
def test_one_object_under_two_names_stays_one(where: str) -> None:
    def build(fill: list[Any]) -> dict[str, Any]:
        both = {"log": fill, "more": [{"log": fill}]}
        return {"log": fill, "more": both["more"]} if where == "two keys" else {"s": both}

    url = f"memory://one-{where.replace(' ', '-')}"
    holdfast.save(url, build([[1], {"t": torch.ones(2)}]), step=1)
    tensor = torch.zeros(2)
    mine: list[Any] = [[0], {"t": tensor}]
    state = build(mine)
    holdfast.load(url, state)
    both = state if where == "two keys" else state["s"]
    assert both["log"] is mine and both["more"][0]["log"] is mine
    assert mine[0] == [1] and mine[1]["t"] is tensor and tensor.tolist() == [1, 1]


@pytest.mark.parametrize(
    "values",
    [([0], [1], [2]), ({"loss": 9}, {"loss": 1, "at": [3]}, {"loss": 2}), tuple(np.eye(3))],
    ids=["list", "dict", "array"],
)
def test_one_placeholder_under_two_keys_that_were_two_is_told(
    values: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second key gets a value of its own; the first keeps the one that the script may hold."""
    for known in ("_restored", "_told"):  # it is told once in a process
        monkeypatch.setattr(f"holdfast.live.restore.filling.{known}", set())
    z, best, last = values
    holdfast.save(tmp_path, {"w": torch.ones(2), "best": best, "last": last}, step=1)
    state = {"w": torch.zeros(2), "best": z, "last": z}
    with (
        holdfast.Checkpointer(tmp_path, state) as ckpt,
        pytest.warns(HoldfastWarning, match=r"best and last are one .* now in last.*two-values\]$"),
    ):
        assert ckpt.restore() == 1
    assert state["best"] is z and state["last"] is not z
    assert np.array_equal(state["best"], best) and np.array_equal(state["last"], last)
    assert state["w"].tolist() == [1, 1]


def test_one_value_of_the_state_that_was_two_is_refused() -> None:
    """It has a tensor in it, or an object, of which holdfast makes no other."""

    def inside(rate: float) -> Any:
        optim = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=rate)
        return {"scheduler": torch.optim.lr_scheduler.StepLR(optim, 3), "log": [rate]}

    saved = {"w": torch.ones(2), "a": inside(1.0), "b": inside(2.0)}
    holdfast.save("memory://were-two", saved, step=1)
    both, w = inside(3.0), torch.zeros(2)
    with pytest.raises(
        StateMismatch, match="a and b are one dict here, and were saved with different"
    ):
        holdfast.load("memory://were-two", {"w": w, "a": both, "b": both})
    assert (both["log"], w.tolist()) == ([3.0], [0, 0])
    apart = {"w": w, "a": inside(0.0), "b": inside(0.0)}
    holdfast.load("memory://were-two", apart)
    assert (apart["a"]["log"], apart["b"]["log"]) == ([1.0], [2.0])
    t = torch.zeros(2)
    of_tensors = {"a": [torch.ones(2), 1], "b": [torch.ones(2), 2]}
    holdfast.save("memory://were-two-with-tensors", of_tensors, step=1)
    one = [t, 0]
    with pytest.raises(StateMismatch, match="a and b are one list here"):
        holdfast.load("memory://were-two-with-tensors", {"a": one, "b": one})


def test_one_object_that_was_two_is_refused() -> None:
    def scheduler(last: int) -> Any:
        optim = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        found = torch.optim.lr_scheduler.StepLR(optim, 3)
        found.last_epoch = last
        return found

    holdfast.save("memory://two-objects", {"a": scheduler(1), "b": scheduler(2)}, step=1)
    one = scheduler(0)
    with pytest.raises(StateMismatch, match="a and b are one StepLR here"):
        holdfast.load("memory://two-objects", {"a": one, "b": one})


def test_one_list_inside_of_a_value_that_was_two_is_told() -> None:
    holdfast.save("memory://were-two-inside", {"two": {"x": [[1]], "y": {"z": [2]}}}, step=1)
    both = [0]
    state: dict[str, Any] = {"two": {"x": [both], "y": {"z": both}}}
    with pytest.warns(
        HoldfastWarning, match=r"two\.x\[0\] and two\.y\.z are one list .*\[two-values\]$"
    ):
        holdfast.load("memory://were-two-inside", state)
    assert state["two"]["x"][0] is both and both == [1] and state["two"]["y"]["z"] == [2]


def test_going_back_to_where_one_object_was_two(tmp_path: Path) -> None:
    """`best = last` in the course of a training; no word, for nothing is lost."""
    state: dict[str, Any] = {"p": {"best": None, "last": None}}
    with holdfast.Checkpointer(tmp_path, state) as ckpt:
        ckpt.save(0).wait(60)
        assert ckpt.restore() == 0
        state["p"]["best"], state["p"]["last"] = {"loss": 2.0}, {"loss": 3.0}
        ckpt.save(1).wait(60)
        state["p"]["best"] = state["p"]["last"] = {"loss": 1.0}
        assert ckpt.restore(step=1) == 1
    assert state["p"] == {"best": {"loss": 2.0}, "last": {"loss": 3.0}}


def test_tensors_in_a_deque_are_filled_unless_another_tensor_lies_there(tmp_path: Path) -> None:
    last, own = torch.full((2,), 3.0), torch.full((2,), 2.0)
    saved = {"last": last, "recent": deque([own, last], maxlen=2)}
    holdfast.save(tmp_path, {"s": saved}, step=1)
    mine, other = torch.zeros(2), torch.zeros(2)
    state: dict[str, Any] = {"s": {"last": mine, "recent": deque([mine, other], maxlen=2)}}
    holdfast.load(tmp_path, state)
    assert mine.tolist() == [3, 3] and state["s"]["last"] is mine
    recent = state["s"]["recent"]
    assert [t.tolist() for t in recent] == [[2, 2], [3, 3]]
    assert recent[1] is other


def test_a_class_of_its_own_that_cannot_be_filled_is_replaced() -> None:
    class Locked(dict[str, Any]):
        def clear(self) -> None:
            raise RuntimeError("locked")

    holdfast.save("memory://locked", {"s": {"own": Locked(a=1)}}, step=1)
    state: dict[str, Any] = {"s": {"own": Locked(a=0)}}
    with pytest.warns(HoldfastWarning, match=r"s\.own \(a dict in place of a Locked"):
        holdfast.load("memory://locked", state)
    assert state["s"]["own"] == {"a": 1}


def test_a_notice_of_filling_can_be_silenced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.errors._silenced", set())
    holdfast.save("memory://silenced", {"s": {"quiet": (1,)}}, step=1)
    holdfast.silence("replaced")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        holdfast.load("memory://silenced", {"s": {"quiet": [0]}})
