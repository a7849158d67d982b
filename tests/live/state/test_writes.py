"""Which writes and moves of a tensor are seen by what."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from holdfast.live.state.writes import (
    Mark,
    Marks,
    Origin,
    address_and_strides,
    corner,
    count_and_address,
)


def other_memory(t: torch.Tensor) -> None:
    t.data = t.data.clone()


def by_numpy(t: torch.Tensor) -> None:
    t.numpy()[:] = 7.0


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "nothing": lambda t: t.sum(),
    "a write": lambda t: t.add_(1.0),
    "a write to a view": lambda t: t[1:].zero_(),
    "a write by way of .data": lambda t: t.data.add_(1.0),
    "a write by numpy": by_numpy,
    "other memory": other_memory,
}
UNCOUNTED = ("a write by way of .data", "a write by numpy")


@pytest.mark.parametrize("what", CHANGES)
def test_changes_of_a_tensor(what: str) -> None:
    t = torch.arange(4096.0)
    count, mark, sampled, marks = (
        see(t)
        for see in (count_and_address, Mark.of, Mark.sampled, lambda t: Marks([t, {"lr": 1}]))
    )
    CHANGES[what](t)
    is_seen = what not in ("nothing", *UNCOUNTED)
    assert (count_and_address(t) != count) is is_seen
    assert Mark.of(t).differs(mark) is is_seen
    assert (Marks([t, {"lr": 1}]) != marks) is is_seen
    assert Mark.sampled(t).differs(sampled) is (what != "nothing")


def test_another_tensor_in_the_same_memory() -> None:
    t = torch.zeros(8)
    other = t.view(8)
    assert count_and_address(other) == count_and_address(t)
    assert Mark.of(other).differs(Mark.of(t))
    assert Marks([other]) != Marks([t])


def test_an_uncounted_write_to_one_element_may_stay_unseen() -> None:
    t = torch.zeros(1 << 20)
    before = Mark.sampled(t)
    t.data[1] = 1.0
    assert not Mark.sampled(t).differs(before)


def test_values_beside_tensors() -> None:
    assert Marks([{"step": 1, "more": [2.0]}]) == Marks([{"step": 1, "more": [2.0]}])
    assert Marks([{"step": 1, "more": [2.0]}]) != Marks([{"step": 1, "more": [3.0]}])
    one, other = np.zeros(3), np.zeros(3)
    assert Marks([one]) == Marks([one]) != Marks([other])  # of other objects: which ones they are


def test_where_a_tensor_was_placed() -> None:
    """A write changes nothing of that; another layout in the same place does."""
    t = torch.zeros(4, 6)
    origin, planned = Origin.of(t), address_and_strides(t)
    t.add_(1.0)
    assert origin.still_has(t) and address_and_strides(t) == planned
    t.t_()
    assert not origin.still_has(t) and address_and_strides(t) != planned
    t.t_()
    assert origin.still_has(t)
    assert not origin.still_has(t.view(4, 6))
    other_memory(t)
    assert not origin.still_has(t)


@pytest.mark.parametrize("shape", [(), (0,), (8,), (5, 7), (1024,), (0, 3)])
def test_a_small_array_is_looked_at_whole(shape: tuple[int, ...]) -> None:
    """A soft update in 16 bits may round to nothing for all elements but one."""
    values = np.zeros(shape, np.uint16)
    for place in np.ndindex(shape):
        before = corner(values).tobytes()
        values[place] += 1
        assert corner(values).tobytes() != before


@pytest.mark.parametrize("shape", [(5000,), (64, 100), (3, 2, 40, 40), (2000, 1), (1, 2000)])
def test_some_dozens_of_elements_of_a_large_one(shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape)).reshape(shape)
    seen = corner(values)
    assert 2 <= seen.size <= 128 and seen.max() >= values.max() // 3
    assert np.array_equal(corner(values + 1), seen + 1)
