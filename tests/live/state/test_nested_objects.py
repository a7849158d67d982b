"""Objects with a state_dict() inside lists and dicts keep their place, and get what was saved."""

from __future__ import annotations

from collections import OrderedDict, deque
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import HoldfastWarning, StateMismatch, UsageError

StepLR = torch.optim.lr_scheduler.StepLR


class Kept:
    """A number and a tensor, small or large."""

    def __init__(self, value: int = 0, size: int = 3) -> None:
        self.value, self.table = value, torch.full((size,), float(value))

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "table": self.table}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.table = state["value"], state["table"]


def reloaded(root: Path, saved: Any, here: Any, **options: Any) -> Any:
    holdfast.save(root, {"s": saved}, step=1)
    state = {"s": here}
    holdfast.load(root, state, **options)
    return state["s"]


def check(one: Kept, value: int, size: int = 3) -> None:
    assert isinstance(one, Kept) and one.value == value
    assert torch.equal(one.table, torch.full((size,), float(value)))


def test_a_list_of_schedulers_goes_on(tmp_path: Path) -> None:
    def make() -> tuple[torch.optim.Optimizer, list[Any]]:
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
        return optimizer, [StepLR(optimizer, 1, 0.5), StepLR(optimizer, 3, 0.5)]

    optimizer, schedulers = make()
    for scheduler in (*schedulers, schedulers[0]):
        optimizer.step()
        scheduler.step()
    expected = [s.state_dict() for s in schedulers]
    _, others = make()
    found = reloaded(tmp_path, schedulers, others)
    assert found is others and all(isinstance(s, StepLR) for s in found)
    assert [s.state_dict() for s in found] == expected


@pytest.mark.parametrize("size", [3, 40_000], ids=["small", "large"])
def test_objects_anywhere_stay_and_get_their_states(tmp_path: Path, size: int) -> None:
    """Beside plain values, in tuples, deques, ordered dicts, under keys that are no text."""

    def tree(first: int) -> Any:
        a, b, c, d, e = (Kept(first + i if first else 0, size) for i in range(5))
        plain = "saved" if first else "here"
        return (a, b, c, d, e), {
            "plain": plain,
            "one": a,
            "in": [(plain, b), deque([c, plain], maxlen=4)],
            3: OrderedDict(x=d, y=plain),
            (1, 2): [[e]],
        }

    _, saved = tree(5)
    objects, here = tree(0)
    found = reloaded(tmp_path, saved, here)
    assert found is here
    for number, one in enumerate(objects):
        check(one, 5 + number, size)
    (plain, b), in_deque = found["in"]
    assert (found["plain"], plain, in_deque[1], found[3]["y"]) == ("saved",) * 4
    places = (found["one"], b, in_deque[0], found[3]["x"], found[(1, 2)][0][0])
    assert all(a is b for a, b in zip(places, objects))
    assert in_deque.maxlen == 4 and type(found[3]) is OrderedDict


@pytest.mark.parametrize(("size", "times"), [(3, 0), (40_000, 1)], ids=["small", "large"])
def test_an_object_is_asked_before_a_load_if_it_has_large_tensors(
    tmp_path: Path, size: int, times: int
) -> None:
    """They are made as it has them, in the order of their dims in memory; others may draw when asked."""

    class Asked(Kept):
        times = 0

        def state_dict(self) -> dict[str, Any]:
            self.times += 1
            return super().state_dict()

    saved, here = Asked(4, size), Asked(0, size)
    saved.table, here.table = (
        saved.table.reshape(-1, 1).expand(-1, 2).clone(),
        torch.empty(2, size).t(),
    )
    reloaded(tmp_path, saved, here)
    assert here.times == times
    assert torch.equal(here.table, saved.table)
    assert here.table.stride() == ((2, 1) if size == 3 else (1, size))


def test_objects_of_a_tuple(tmp_path: Path) -> None:
    here = (Kept(), 1)
    found = reloaded(tmp_path, (Kept(4), 2), here)
    assert found[0] is here[0] and found[1] == 2
    check(here[0], 4)


def test_an_object_that_was_not_saved_is_told_before_anything_is_touched(tmp_path: Path) -> None:
    one, other = Kept(), Kept()
    for options in ({}, {"strict": False}):
        with pytest.raises(StateMismatch, match=r"missing in the checkpoint: s\.\[1\], a Kept"):
            reloaded(tmp_path, [Kept(4)], [one, other], **options)
    with pytest.raises(StateMismatch, match=r"missing in the checkpoint: s\.b\[0\], a Kept"):
        reloaded(tmp_path, {"a": Kept(4), "b": []}, {"a": one, "b": [other]})
    check(one, 0)


def test_a_saved_object_that_is_not_here_is_told(tmp_path: Path) -> None:
    one = Kept()
    with pytest.raises(
        StateMismatch, match=r"s\.\[1\]: the state of an object was saved, and here is"
    ):
        reloaded(tmp_path, [Kept(4), Kept(5)], [one])
    check(one, 0)
    found = reloaded(tmp_path, [Kept(4), Kept(5)], [one], strict=False)
    check(one, 4)
    assert found[1]["value"] == 5


def test_a_plain_state_goes_into_the_object(tmp_path: Path) -> None:
    """As a checkpoint of torch.save has it."""
    one = Kept()
    torch.save({"model": {"w": torch.ones(2)}, "s": [Kept(4).state_dict()]}, tmp_path / "all.pt")
    state = {"model": {"w": torch.zeros(2)}, "s": [one]}
    holdfast.load(f"torch:{tmp_path / 'all.pt'}", state)
    assert state["s"][0] is one
    check(one, 4)


def test_modules_in_a_dict_are_named_and_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"s\.a: a torch\.nn\.modules\.linear\.Linear cannot be saved"
    ):
        holdfast.save(tmp_path, {"s": {"a": nn.Linear(2, 2)}}, step=1)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("saved", [None, 3, [1.0], (1, 2), torch.ones(2)], ids=str)
def test_an_object_where_a_plain_value_was_saved(tmp_path: Path, saved: Any, strict: bool) -> None:
    """Told before anything is loaded."""
    model = torch.nn.Linear(2, 2)
    holdfast.save(tmp_path, {"model": model, "more": {"sched": saved}}, step=1)
    other = torch.nn.Linear(2, 2)
    before = other.weight.detach().clone()
    sched = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(other.parameters(), lr=0.1), 3)
    with pytest.raises(StateMismatch, match=r"more\.sched: no state of an object was saved"):
        holdfast.load(tmp_path, {"model": other, "more": {"sched": sched}}, strict=strict)
    assert torch.equal(other.weight, before)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("saved", [None, 3, [1.0], (1, 2)], ids=str)
def test_an_object_as_a_value_of_the_state_where_a_plain_one_was_saved(
    tmp_path: Path, saved: Any, strict: bool
) -> None:
    """Told before anything is loaded, too."""
    model = torch.nn.Linear(2, 2)
    holdfast.save(tmp_path, {"model": model, "sched": saved}, step=1)
    other = torch.nn.Linear(2, 2)
    before = other.weight.detach().clone()
    with pytest.raises(StateMismatch, match=r"sched: no state of an object was saved.* a Kept"):
        holdfast.load(tmp_path, {"model": other, "sched": Kept()}, strict=strict)
    assert torch.equal(other.weight, before)


class Number:
    """An object whose state is no dict, and which has none before it is loaded."""

    def __init__(self, value: int | None = None) -> None:
        self.value = value

    def state_dict(self) -> int:
        if self.value is None:
            raise RuntimeError("not loaded yet")
        return self.value

    def load_state_dict(self, state: int) -> None:
        self.value = state


@pytest.mark.parametrize("here", [None, 1])
def test_a_state_may_be_a_number(tmp_path: Path, here: int | None) -> None:
    assert reloaded(tmp_path, Number(5), Number(here)).value == 5


class Endless:
    """An object that is its own state."""

    def state_dict(self) -> Any:
        return self

    def load_state_dict(self, state: Any) -> None: ...


def test_objects_in_objects_without_end_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="s: objects whose state_dict\\(\\) has objects, deeper than"
    ):
        holdfast.save(tmp_path, {"s": Endless()}, step=1)


class Averages(dict[str, Any]):
    """A dict that has more to tell than what it holds."""

    def __init__(self, count: int = 0, **values: Any) -> None:
        super().__init__(values)
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "values": dict(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.update(state["values"])


class History(list[Any]):
    """A list likewise; its state is the object itself."""

    def __init__(self, number: int = 0, *values: Any) -> None:
        super().__init__(values)
        self.number = number

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "values": list(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number, self[:] = state["number"], state["values"]


@pytest.mark.parametrize("wrap", [lambda x: {"a": x}, lambda x: [1, x]], ids=["dict", "list"])
def test_lists_and_dicts_that_are_objects_tell_for_themselves(tmp_path: Path, wrap: Any) -> None:
    saved = [Averages(3, loss=torch.ones(4)), History(5, torch.full((40_000,), 2.0))]
    here = [Averages(), History()]
    averages, history = here
    reloaded(tmp_path, wrap(saved), wrap(here))
    assert averages.count == 3 and torch.equal(averages["loss"], torch.ones(4))
    assert history.number == 5 and torch.equal(history[0], torch.full((40_000,), 2.0))


class Outer:
    """An object whose state_dict() has objects themselves, as that of a scheduler has."""

    def __init__(self, **inside: Any) -> None:
        self.inside = inside

    def state_dict(self) -> dict[str, Any]:
        return dict(self.inside)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inside.update(state)


class Warmup(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler that hands over to another one after three steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, after: Any) -> None:
        self.after = after
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        if self.last_epoch > 3:
            self.after.step()
            return list(self.after.get_last_lr())
        return [0.1 for _ in self.base_lrs]


def test_a_scheduler_in_a_scheduler_goes_on(tmp_path: Path) -> None:
    def make() -> tuple[torch.optim.Optimizer, Warmup]:
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
        return optimizer, Warmup(optimizer, StepLR(optimizer, 2, 0.5))

    def go(optimizer: torch.optim.Optimizer, scheduler: Warmup, steps: int) -> list[Any]:
        rates = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    optimizer, scheduler = make()
    go(optimizer, scheduler, 5)
    holdfast.save(tmp_path, {"optim": optimizer, "sched": scheduler}, step=5)
    expected = go(optimizer, scheduler, 6)
    other, fresh = make()
    after = fresh.after
    holdfast.load(tmp_path, {"optim": other, "sched": fresh})
    assert fresh.after is after and after.optimizer is other
    assert go(other, fresh, 6) == expected


@pytest.mark.parametrize("size", [3, 40_000], ids=["small", "large"])
def test_objects_of_an_object_stay_and_get_their_states(tmp_path: Path, size: int) -> None:
    one, deep = Kept(0, size), Kept(0, size)
    outer = Outer(one=[one], deep=Outer(deep=deep))
    saved = Outer(one=[Kept(4, size)], deep=Outer(deep=Kept(5, size)))
    found = reloaded(tmp_path, saved, outer)
    assert found.inside["one"][0] is one and found.inside["deep"].inside["deep"] is deep
    check(one, 4, size)
    check(deep, 5, size)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("where", ["value", "list", "deep"])
def test_a_saved_object_of_an_object_that_is_not_here_is_told(
    tmp_path: Path, where: str, strict: bool
) -> None:
    saved, here = Outer(a=1, one=Kept(4)), Outer(a=0, one=None)
    if where == "deep":
        saved, here = Outer(x=saved), Outer(x=here)
    states = ([saved], [here]) if where == "list" else (saved, here)
    told = r"one: the state of an object was saved, and here is"
    if strict:
        with pytest.raises(StateMismatch, match=told):
            reloaded(tmp_path, *states)
        assert here.inside in ({"a": 0, "one": None}, {"x": here.inside.get("x")})
        return
    with pytest.warns(HoldfastWarning, match=told):
        reloaded(tmp_path, *states, strict=False)
    assert here.inside.get("x", here).inside["a"] == 1


class Extra(nn.Module):
    """Its extra state has an object."""

    def __init__(self, kept: Kept | None) -> None:
        super().__init__()
        self.kept = kept

    def get_extra_state(self) -> Any:
        return {"kept": self.kept}

    def set_extra_state(self, state: Any) -> None:
        self.kept = state["kept"]


def test_objects_in_extra_states_stay(tmp_path: Path) -> None:
    kept = Kept()
    found = reloaded(tmp_path, Extra(Kept(4)), Extra(kept))
    assert found.kept is kept
    check(kept, 4)
    with pytest.raises(StateMismatch, match="the state of an object was saved"):
        reloaded(tmp_path / "none", Extra(Kept(4)), Extra(None))


def test_objects_in_an_optimizer_stay(tmp_path: Path) -> None:
    def make(value: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        optimizer.param_groups[0]["kept"] = Kept(value)
        optimizer.state[net.weight]["kept"] = Kept(value)
        return net, optimizer

    net, optimizer = make(4)
    holdfast.save(tmp_path, {"net": net, "optim": optimizer}, step=1)
    net, optimizer = make(0)
    places = (optimizer.param_groups[0], optimizer.state[net.weight])
    before = [place["kept"] for place in places]
    holdfast.load(tmp_path, {"net": net, "optim": optimizer})
    for place, kept in zip(places, before):
        assert place["kept"] is kept
        check(kept, 4)
    del optimizer.state[net.weight]["kept"]
    with pytest.raises(StateMismatch, match=r"optim.weight.kept: the state of an object was saved"):
        holdfast.load(tmp_path, {"net": net, "optim": optimizer})


class Phase(str, Enum):
    """Keys that are texts and print as another one."""

    TRAIN = "train"
    TEST = "test"


@pytest.mark.parametrize("size", [3, 40_000], ids=["small", "large"])
def test_objects_under_keys_of_an_enum_stay_and_get_their_states(tmp_path: Path, size: int) -> None:
    saved = {Phase.TRAIN: Kept(4, size), Phase.TEST: {Phase.TRAIN: Kept(5, size)}}
    one, other = Kept(0, size), Kept(0, size)
    found = reloaded(tmp_path, saved, {Phase.TRAIN: one, Phase.TEST: {Phase.TRAIN: other}})
    assert found[Phase.TRAIN] is one and found[Phase.TEST][Phase.TRAIN] is other
    check(one, 4, size)
    check(other, 5, size)
