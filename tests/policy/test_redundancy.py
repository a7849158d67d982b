"""The strongest scheme that fits the nodes there are: against all that are weaker than what was wanted."""

from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.policy.redundancy import fitting, parity_groups
from holdfast.policy.survival import Scheme, copy, none, rs


def fits(scheme: Scheme, nodes: list[str]) -> bool:
    try:
        parity_groups(nodes, scheme)
    except UsageError:
        return False
    return True


def can_be_parted(nodes: tuple[str, ...], least: int) -> bool:
    """Whether ranks can be divided into groups of so many, none with two ranks of a node: by trying all."""
    if not nodes:
        return True
    first, rest = nodes[0], nodes[1:]
    for size in range(least - 1, len(rest) + 1):
        for others in combinations(range(len(rest)), size):
            group = {first, *(rest[i] for i in others)}
            left = tuple(n for i, n in enumerate(rest) if i not in others)
            if len(group) == size + 1 and can_be_parted(left, least):
                return True
    return False


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.integers(1, 3), st.randoms())
def test_ranks_are_grouped_whenever_they_can_be(
    ranks: list[int], losses: int, random: Random
) -> None:
    nodes = [f"n{n}" for n, count in enumerate(ranks) for _ in range(count)][:8]
    random.shuffle(nodes)
    if len(set(nodes)) == 1:
        return
    assert fits(rs(losses), nodes) == can_be_parted(tuple(nodes), losses + 1)
    if fits(rs(losses), nodes):
        found = parity_groups(nodes, rs(losses))
        assert sorted(r for group in found for r in group) == list(range(len(nodes)))
        assert all(len({nodes[r] for r in group}) == len(group) > losses for group in found)
        assert max(map(len, found)) <= 8


def test_uneven_nodes() -> None:
    """The loss of any one of three nodes is borne, though one of them has two ranks."""
    nodes = ["a", "a", "b", "c"]
    assert fitting(rs(1), nodes) == rs(1)
    assert parity_groups(nodes, rs(1)) == [(0, 2), (1, 3)]
    assert fitting(rs(2), nodes) == rs(1)
    assert fitting(rs(1), ["a", "a", "b"]) == none()
    many = [f"n{r // 8}" for r in range(64 * 8)] + ["fuller"] * 10
    assert {len(g) for g in parity_groups(many, rs(1))} == {7, 8}


@given(st.lists(st.integers(1, 3), min_size=1, max_size=9), st.integers(1, 4), st.booleans())
def test_the_strongest_that_fits(ranks: list[int], losses: int, parity: bool) -> None:
    nodes = [f"n{n}" for n, count in enumerate(ranks) for _ in range(count)]
    wanted = rs(losses) if parity else copy(losses + 1)
    found = fitting(wanted, nodes)
    assert fits(found, nodes)
    stronger = range(found.losses + 1, losses + 1)
    assert not any(fits(Scheme(wanted.kind, n), nodes) for n in stronger)


@pytest.mark.parametrize(("num_nodes", "kept"), [(5, rs(2)), (3, rs(2)), (2, rs(1)), (1, none())])
def test_after_losses(num_nodes: int, kept: Scheme) -> None:
    assert fitting(rs(2), [f"n{n}" for n in range(num_nodes)]) == kept
