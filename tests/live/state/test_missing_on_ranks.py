"""Which names look as if a rank had forgotten them."""

from __future__ import annotations

import pytest

from holdfast.live.saving.missing_notices import forgotten_names

Held = list[dict[str, set[str]]]


def found(held: Held) -> dict[str, tuple[list[int], list[int]]]:
    return forgotten_names(
        [({(key, ""): s for key, s in one.items()}, [r]) for r, one in enumerate(held)]
    )


@pytest.mark.parametrize(
    "held",
    [
        [{"m": {"a", "b"}}, {"m": {"a", "b"}}],
        [{"m": {"a"}}, {"m": {"b"}}],
        [{"m": {"shared", "e0", "e1", "e2"}}, {"m": {"shared", "e3", "e4"}}],
        [{"m": {"a"}, "o": {"x"}}, {"m": {"a"}}],
        [{"m": {"a"}}, {"m": set()}],
    ],
    ids=["alike", "stages", "experts", "a key of its own", "nothing of it"],
)
def test_nothing_is_lacking(held: Held) -> None:
    assert found(held) == {}


def test_a_rank_that_has_nothing_of_its_own_lacks_something() -> None:
    assert found([{"m": {"a", "b"}}, {"m": {"a"}}]) == {"b": ([0], [1])}
    stages: Held = [{"m": {"a", "b"}}, {"m": {"a", "b"}}, {"m": {"c"}}, {"m": {"c", "d"}}]
    assert found(stages) == {"d": ([3], [2])}


def test_many_sets_of_names_are_experts() -> None:
    held = [{"m": {str(i) for i in range(n + 1)}} for n in range(60)]
    assert found(held) == {}
