"""The wasted-time model against brute force, its closed forms and Young's."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf, sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.policy.wasted import (
    Costs,
    Frequencies,
    Rates,
    best_period,
    choose_frequencies,
    floors,
    wasted,
)

MODERATE = settings(max_examples=60, deadline=None)
ALL = ("memory", "delta")


def logarithmic(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(0, 1).map(lambda x: low * (high / low) ** x)


def one_base(
    f: float, b: float, *, mtbf_s: float, save_s: float, load_s: float, batch_s: float
) -> float:
    """T_w / T at f saves per second and a batch every b seconds; replaying one takes `batch_s`."""
    return (b / 2 + load_s + batch_s / 2 * (1 / (f * b) - 1)) / mtbf_s + save_s * f


def one_base_optimum(*, mtbf_s: float, save_s: float, batch_s: float) -> tuple[float, float]:
    """f* and b*, where both derivatives of `one_base` vanish."""
    f = (batch_s / (4 * save_s**2 * mtbf_s**2)) ** (1 / 3)
    return f, sqrt(batch_s / f)


@given(logarithmic(60, 1e6), logarithmic(0.1, 1e3), logarithmic(0.01, 10))
@MODERATE
def test_one_base_optimum_by_brute_force(mtbf_s: float, save_s: float, batch_s: float) -> None:
    f, b = one_base_optimum(mtbf_s=mtbf_s, save_s=save_s, batch_s=batch_s)
    assert f * b * b == pytest.approx(batch_s)
    assert b == pytest.approx((2 * save_s * batch_s * mtbf_s) ** (1 / 3))

    def waste(f: float, b: float) -> float:
        return one_base(f, b, mtbf_s=mtbf_s, save_s=save_s, load_s=0.0, batch_s=batch_s)

    around = [1.05**i for i in range(-40, 41)]
    least = min(waste(f * x, b * y) for x in around for y in around)
    assert least >= waste(f, b) * (1 - 1e-9)


@given(logarithmic(60, 1e6), logarithmic(0.1, 100), logarithmic(0.01, 10), st.integers(1, 50))
@MODERATE
def test_the_model_contains_that_of_one_base(
    mtbf_s: float, save_s: float, r: float, batch: int
) -> None:
    """Node losses alone, replay by the batch, steps of a second, everything written at once."""
    costs = Costs(1.0, durable_stall_s=save_s, durable_s=save_s, durable_load_s=7.0, open_s=r)
    for period in (batch, batch * 3, 1000 * batch):
        found = wasted(costs, Rates(0.0, 1 / mtbf_s), Frequencies(period, None, 1, batch))
        terms = {"mtbf_s": mtbf_s, "save_s": save_s, "load_s": 7.0, "batch_s": r}
        assert found.total == pytest.approx(one_base(1 / period, batch, **terms))


def test_young() -> None:
    """Without records the best period is sqrt(2 C M): Young, 1974."""
    assert best_period(30.0, 2.0, 1 / 3600, 2.0) * 2.0 == pytest.approx(sqrt(2 * 30 * 3600))


COSTS = st.builds(
    Costs,
    step_s=logarithmic(0.1, 10),
    durable_stall_s=logarithmic(0.001, 5),
    durable_s=logarithmic(0.1, 30),
    durable_load_s=logarithmic(0.1, 30),
    memory_stall_s=logarithmic(0.001, 1),
    memory_s=logarithmic(0.01, 10),
    memory_load_s=logarithmic(0.01, 1),
    record_stall_s=logarithmic(0.0001, 0.1),
    record_s=logarithmic(0.001, 0.5),
    batch_s=logarithmic(0.001, 1),
    batch_stall_s=st.sampled_from([0.0, 0.01]),
    replay_s=logarithmic(0.01, 1),
    open_s=st.sampled_from([0.0, 0.1]),
)
RATES = st.builds(
    Rates, logarithmic(1e-6, 1e-3), logarithmic(1e-6, 1e-3), st.sampled_from([0.0, 1e-3, 0.5, 1.0])
)
MOST = 24


def by_brute_force(costs: Costs, rates: Rates, overhead: float) -> float:
    """The least waste over all frequencies up to MOST steps."""
    d0, m0, b0 = floors(costs)
    least = inf
    for memory in (None, *range(m0, MOST + 1)):
        for batch in (None, *range(b0, (memory or MOST) + 1)):
            for durable in range(max(d0, batch or 1), MOST + 1):
                delta = None if batch is None else 1
                waste = wasted(costs, rates, Frequencies(durable, memory, delta, batch))
                if waste.saving <= overhead:
                    least = min(least, waste.total)
    return least


@given(COSTS, RATES, st.sampled_from([0.005, 0.03, 0.5]))
@settings(max_examples=10, deadline=None)
def test_the_choice_is_the_best_of_all(costs: Costs, rates: Rates, overhead: float) -> None:
    costs = replace(
        costs, durable_s=min(costs.durable_s, 20 * costs.step_s),
        memory_s=min(costs.memory_s, 10 * costs.step_s),
    )  # fmt: skip
    found = choose_frequencies(costs, rates, ALL, overhead=overhead, rarest=MOST)
    least = by_brute_force(costs, rates, overhead)
    if found is None:
        assert least == inf
    else:
        waste = wasted(costs, rates, found)
        assert waste.saving <= overhead * (1 + 1e-9)
        assert waste.total <= least * 1.01


@given(COSTS, RATES, st.sampled_from([0.005, 0.03, 0.5]), st.sampled_from([(), ALL]))
@MODERATE
def test_clamped(costs: Costs, rates: Rates, overhead: float, tiers: tuple[str, ...]) -> None:
    """Whole steps; f b <= 1; each write is done before the next; never above the overhead."""
    found = choose_frequencies(costs, rates, tiers, overhead=overhead, rarest=100_000)
    assert found is not None and found.valid and found.durable is not None
    assert found.durable * costs.step_s >= costs.durable_s
    if found.memory is not None:
        assert found.memory * costs.step_s >= costs.memory_s
    if found.batch is not None:
        assert 1 <= found.batch <= found.durable
        assert costs.batch_s + found.batch * costs.record_s <= found.batch * costs.step_s * (
            1 + 1e-9
        )
    assert wasted(costs, rates, found).saving <= overhead * (1 + 1e-9)


def test_records_that_storage_cannot_keep_up_with_are_not_kept() -> None:
    costs = Costs(1.0, 5.0, 20.0, 20.0, record_s=1.1, replay_s=0.1)
    rates = Rates(1e-3, 1e-3)
    found = choose_frequencies(costs, rates, ("delta",), overhead=0.1, rarest=10_000)
    assert found is not None and found.delta is None
    slower = replace(costs, record_s=0.5, batch_s=2.0)
    found = choose_frequencies(slower, rates, ("delta",), overhead=0.1, rarest=10_000)
    assert found is not None and (found.delta, found.batch) == (1, 4)


def test_records_above_the_overhead_are_not_kept() -> None:
    """Even where durable saves cost nothing."""
    costs = Costs(1.0, 0.0, 100.0, 1.0, record_stall_s=0.1, replay_s=0.1)
    for overhead, delta in ((0.05, None), (0.15, 1)):
        found = choose_frequencies(
            costs, Rates(1e-2, 1e-2), ("delta",), overhead=overhead, rarest=10_000
        )
        assert found is not None and found.delta == delta


def test_processes_recover_from_memory_and_lost_nodes_from_storage() -> None:
    costs = Costs(1.0, 1.0, 1.0, 100.0, memory_stall_s=0.1, memory_s=0.1, memory_load_s=2.0)
    f = Frequencies(durable=1000, memory=10)
    alone = wasted(costs, Rates(1e-4, 0.0), f)
    assert (alone.lost, alone.loading) == pytest.approx((5e-4, 2e-4))
    borne = wasted(costs, Rates(0.0, 1e-4, beyond=0.0), f)
    assert borne == alone
    beyond = wasted(costs, Rates(0.0, 1e-4, beyond=1.0), f)
    assert (beyond.lost, beyond.loading) == pytest.approx((500e-4, 100e-4))


def test_late_bases_are_older() -> None:
    """A save that takes 40 s is committed 40 steps after its step."""
    costs = Costs(1.0, 0.0, 40.0, 0.0)
    found = wasted(costs, Rates(0.0, 1e-4), Frequencies(durable=100))
    assert found.lost == pytest.approx(1e-4 * (50 + 40))
    assert ceil(costs.durable_s / costs.step_s) == floors(costs)[0] == 40
