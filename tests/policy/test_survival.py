"""Survival probabilities: the paper's formulas, every set of losses by brute force, and a simulation."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from itertools import product
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.codec import stripes
from holdfast.errors import UsageError
from holdfast.policy import survival
from holdfast.policy.survival import (
    Nodes,
    Scheme,
    copy,
    failure_within,
    fatal_sets,
    group_loss,
    loss,
    none,
    rs,
    time_to_loss,
)

MODERATE = settings(max_examples=60, deadline=None)
PROBABILITIES = st.sampled_from([0.0, 1e-9, 0.01, 0.3, 0.5, 1.0])


def survives(scheme: Scheme, lost: list[bool]) -> bool:
    """From the description: at most so many, or no so many neighbours."""
    n, r = len(lost), scheme.losses + 1
    if scheme.kind == "rs":
        return sum(lost) < r
    return not any(all(lost[(i + d) % n] for d in range(r)) for i in range(n))


def by_enumeration(scheme: Scheme, groups: list[Nodes], failures: Mapping[int, float]) -> float:
    """The sum over all sets of lost nodes."""
    nodes, total = sorted({node for g in groups for node in g}), 0.0
    for outcome in product([False, True], repeat=len(nodes)):
        lost = dict(zip(nodes, outcome))
        if not all(survives(scheme, [lost[node] for node in g]) for g in groups):
            total += math.prod(failures[n] if lost[n] else 1 - failures[n] for n in nodes)
    return total


@st.composite
def schemes(draw: st.DrawFn, num_members: int) -> Scheme:
    losses = draw(st.integers(0, num_members - 1))
    return draw(st.sampled_from([rs(losses), copy(losses + 1)]))


@pytest.mark.parametrize("n", [2, 3, 4, 8, 31])
@pytest.mark.parametrize("q", [1e-4, 0.05, 0.4])
def test_the_paper_s_formulas(n: int, q: float) -> None:
    """Of the ring, by the number of ways to choose j of n in a circle with no neighbours."""
    p = 1 - q

    def apart(j: int) -> int:
        return n * comb(n - j, j) // (n - j) if j < n else 0

    ring = sum(apart(j) * p ** (n - j) * q**j for j in range(n // 2 + 1))
    expected = {
        none(): p**n,
        rs(1): p**n + n * p ** (n - 1) * q,
        copy(2): ring,
        rs(n - 1): 1 - q**n,
    }
    for m in range(n):
        expected[rs(m)] = sum(comb(n, j) * p ** (n - j) * q**j for j in range(m + 1))
    for scheme, value in expected.items():
        assert 1 - group_loss(scheme, [q] * n) == pytest.approx(value, abs=1e-13)
        groups = [tuple(range(i * n, i * n + n)) for i in range(5)]
        assert 1 - loss(scheme, groups, q) == pytest.approx(value**5, abs=1e-12)


def test_copies_are_better_than_parity_from_four_on() -> None:
    assert group_loss(copy(2), [0.01] * 3) == pytest.approx(group_loss(rs(1), [0.01] * 3))
    assert all(group_loss(copy(2), [0.01] * n) < group_loss(rs(1), [0.01] * n) for n in (4, 5, 9))


@MODERATE
@given(st.lists(PROBABILITIES, min_size=1, max_size=8), st.data())
def test_a_group_by_brute_force(failures, data) -> None:
    scheme = data.draw(schemes(len(failures)))
    group = tuple(range(len(failures)))
    expected = by_enumeration(scheme, [group], dict(enumerate(failures)))
    assert group_loss(scheme, failures) == pytest.approx(expected, rel=1e-9)


@MODERATE
@given(st.integers(2, 4), st.lists(PROBABILITIES, min_size=7, max_size=7), st.data())
def test_groups_that_share_nodes_by_brute_force(size, failures, data) -> None:
    """Members of one group on one node, groups on common nodes, and groups apart."""
    scheme = data.draw(schemes(size))
    node = st.integers(0, 6)
    groups = data.draw(st.lists(st.tuples(*[node] * size), min_size=1, max_size=4))
    expected = by_enumeration(scheme, groups, dict(enumerate(failures)))
    found = loss(scheme, groups, dict(enumerate(failures)))
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-15)


@MODERATE
@given(st.integers(2, 4), st.data())
def test_fatal_sets_are_the_least_that_are_not_survived(size, data) -> None:
    scheme = data.draw(schemes(size))
    node = st.integers(0, 5)
    groups = data.draw(st.lists(st.tuples(*[node] * size), min_size=1, max_size=3))
    fatal = fatal_sets(scheme, groups, 4)
    nodes = sorted({n for g in groups for n in g})
    for outcome in product([False, True], repeat=len(nodes)):
        lost = {n for n, gone in zip(nodes, outcome) if gone}
        dead = not all(survives(scheme, [n in lost for n in g]) for g in groups)
        assert dead == any(f <= lost for f in fatal)
        assert survival.survives(scheme, groups, lost) == (not dead)
    assert not any(a < b for a in fatal for b in fatal)


@pytest.mark.parametrize("n", range(1, 8))
def test_schemes_survive_what_their_stripes_do(n: int) -> None:
    """The layout that rebuilds, and the description that is computed with."""
    share = [640] * n
    pairs = [(none(), stripes.none(share))]
    pairs += [(copy(r), stripes.copy(share, r)) for r in range(1, n + 1)]
    pairs += [(rs(m), stripes.rs(share, m)) for m in range(1, n)]
    for outcome in product([False, True], repeat=n):
        lost = {j for j, gone in enumerate(outcome) if gone}
        for scheme, layout in pairs:
            assert scheme.survives(outcome) == layout.survives(lost)


def test_a_simulation_agrees() -> None:
    """Eight nodes of four groups; two groups have two members on each of their nodes."""
    groups = [(0, 1, 2, 3), (4, 5, 6, 7), (0, 0, 4, 4), (3, 7, 3, 7)]
    q, rng, rounds = failure_within(100.0, 12.0), random.Random(7), 20_000
    for scheme in (rs(1), rs(2), copy(2), copy(3)):
        expected, hits = loss(scheme, groups, q), 0
        for _ in range(rounds):
            lost = [rng.expovariate(1 / 100.0) < 12.0 for _ in range(8)]
            hits += not all(survives(scheme, [lost[node] for node in g]) for g in groups)
        assert abs(hits / rounds - expected) < 4 * math.sqrt(expected * (1 - expected) / rounds)


def test_rare_losses_are_not_rounded_away() -> None:
    assert group_loss(rs(2), [1e-8] * 4) == pytest.approx(4e-24)
    assert group_loss(copy(3), [1e-8] * 5) == pytest.approx(5e-24)
    groups = [tuple(range(4 * i, 4 * i + 4)) for i in range(1000)]
    assert loss(rs(2), groups, 1e-8) == pytest.approx(4e-21)
    assert loss(rs(1), [(0, 0, 1, 1)], 1e-20) == pytest.approx(2e-20)


def test_groups_on_the_same_nodes_are_lost_together() -> None:
    """Eight tensor-parallel ranks of a node are in eight groups, and lose them as one."""
    groups = [(0, 1, 2, 3)] * 8
    assert loss(rs(1), groups, 0.1) == pytest.approx(group_loss(rs(1), [0.1] * 4))


def test_lifetimes() -> None:
    assert failure_within(1000.0, 30.0) == pytest.approx(1 - math.exp(-0.03))
    assert failure_within(1e12, 1e-8) == pytest.approx(1e-20)


def test_the_time_to_a_loss_is_that_of_a_simulation() -> None:
    rng, q, rounds = random.Random(3), 0.08, 4000
    expected = time_to_loss(group_loss(rs(1), [q] * 4), 60.0)
    total = 0
    for _ in range(rounds):
        total += 1
        while sum(rng.random() < q for _ in range(4)) <= 1:
            total += 1
    assert 60.0 * total / rounds == pytest.approx(expected, rel=4 / math.sqrt(rounds))
    assert time_to_loss(0.0, 60.0) == math.inf


def test_what_cannot_be_counted_or_meant_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survival, "_MOST_SETS", 5000)
    ring = [(i, i + 1, i + 2, i + 3) for i in range(200)]
    with pytest.raises(UsageError, match="203 nodes hang together"):
        loss(copy(2), ring, 0.01)
    for scheme in (rs(3), copy(4), copy(0)):
        with pytest.raises(UsageError, match="a group of 3 cannot survive"):
            group_loss(scheme, [0.1] * 3)
