"""The simulator against closed forms, a simulation step by step, and itself."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.policy.cluster import Cluster, Failure, at_random, from_trace
from holdfast.policy.simulate import Fixed, Outcome, Strategy, simulate, strategies
from holdfast.policy.tuning import Auto
from holdfast.policy.wasted import Costs, Frequencies, Rates, wasted

DAY_S = 86400.0


def random_failures(
    cluster: Cluster, until_s: float, seed: int = 0, shape: float = 1.0
) -> list[Failure]:
    return at_random(
        np.random.default_rng(seed), mtbf_s=cluster.mtbf_s, until_s=until_s,
        num_nodes=cluster.num_nodes, node_share=cluster.node_share, shape=shape,
    )  # fmt: skip


def adds_up(o: Outcome) -> bool:
    parts = o.training_s + o.saving_s + o.lost_s + o.recovering_s
    return parts == pytest.approx(o.wall_s, rel=1e-9)


# -- against closed forms -------------------------------------------------------------------------


@pytest.mark.parametrize("mtbf_s", [600.0, 3000.0])
def test_daly(mtbf_s: float) -> None:
    """Synchronous checkpoints: Daly's exact expected time, with failures in saves and restarts too.

    Daly (2006), the complete cost function, per second of training:
    M exp(R/M) (exp((tau + delta)/M) - 1) / tau.
    """
    period, step_s, save_s, load_s, restart_s = 100, 2.0, 30.0, 40.0, 60.0
    cluster = Cluster(devices=1, device_mtbf_hours=mtbf_s / 3600, restart_s=restart_s)
    costs = Costs(step_s, durable_stall_s=save_s, durable_s=save_s, durable_load_s=load_s)
    until_s = 20_000 * mtbf_s
    found = simulate(
        Strategy("checkpoint", costs, Fixed(Frequencies(durable=period))), cluster,
        random_failures(cluster, until_s), until_s,
    )  # fmt: skip
    tau = period * step_s
    expected = tau / (
        mtbf_s * math.exp((restart_s + load_s) / mtbf_s) * math.expm1((tau + save_s) / mtbf_s)
    )
    assert adds_up(found)
    assert found.effective == pytest.approx(expected, rel=0.012)  # 20,000 failures: 0.7 %


FREQUENCIES = [
    Frequencies(durable=400),
    Frequencies(durable=2000, memory=40),
    Frequencies(durable=400, delta=1, batch=20),
    Frequencies(durable=2000, memory=100, delta=1, batch=10),
]


@pytest.mark.parametrize("f", FREQUENCIES, ids=str)
def test_the_wasted_time_model(f: Frequencies) -> None:
    """Where failures are rare, each part of the waste is what the closed form says."""
    costs = Costs(
        1.0, durable_stall_s=2.0, durable_s=50.0, durable_load_s=30.0, memory_stall_s=0.2, memory_s=3.0,
        memory_load_s=5.0, record_stall_s=0.02, record_s=0.05, batch_s=0.5, replay_s=0.2, open_s=0.3,
    )  # fmt: skip
    cluster = Cluster(
        devices=512, device_mtbf_hours=512 * 30.0, node_share=0.4, restart_s=0.0, repair_s=6e3
    )
    num_failures = 15_000
    until_s = num_failures * cluster.mtbf_s
    found = simulate(
        Strategy("x", costs, Fixed(f), group=8), cluster, random_failures(cluster, until_s), until_s
    )
    expected = wasted(costs, cluster.rates(8), f)
    trained = found.training_s
    assert adds_up(found)
    assert found.saving_s / trained == pytest.approx(expected.saving, rel=0.01)
    recovering = expected.loading + expected.replaying
    assert found.recovering_s / trained == pytest.approx(recovering, rel=0.05)
    assert found.lost_s / trained == pytest.approx(expected.lost, rel=0.05)


def test_losses_that_a_group_does_not_bear() -> None:
    """Two of eight nodes within the time of a repair: as often as `beyond` says."""
    cluster = Cluster(devices=800, device_mtbf_hours=800.0, node_share=1.0, repair_s=7200.0)
    until_s = 10_000 * cluster.mtbf_s
    costs = Costs(1.0, 0.0, 0.0, 0.0)
    f = Frequencies(durable=100, memory=1)
    found = simulate(
        Strategy("x", costs, Fixed(f), group=8), cluster, random_failures(cluster, until_s), until_s
    )
    expected = cluster.beyond(8)
    assert 0.05 < expected < 0.3
    assert found.from_storage / found.failures == pytest.approx(expected, rel=0.1)
    assert Cluster(devices=8).beyond(8) == 1.0
    assert Cluster(devices=80, node_share=0.0).beyond(8) == 0.0


# -- against a simulation that takes every step ----------------------------------------------------


def step_by_step(
    costs: Costs, f: Frequencies, cluster: Cluster, failures: list[Failure], until_s: float
) -> tuple[int, int, int]:
    """(steps, lost steps, replayed steps): one step after the other, and everything as a list of facts."""
    now = resume = 0.0
    step = lost = replayed = 0
    durable, memory, written = [(0, 0.0)], [(-1, 0.0)], [(0, 0.0)]  # (step, when it holds)
    for failure in [*failures, Failure(until_s)]:
        since, now = step, resume
        stall = 0.0
        while True:
            done = now + stall + costs.step_s + (costs.record_stall_s if f.delta else 0.0)
            if done > failure.time_s:
                break
            now, step, stall = done, step + 1, 0.0
            if f.durable and step % f.durable == 0:
                stall += costs.durable_stall_s
                durable.append((step, now + costs.durable_s))
            if f.memory and step % f.memory == 0:
                stall += costs.memory_stall_s
                memory.append((step, now + costs.memory_s))
            if f.batch and step % f.batch == 0:
                written.append((step, now + costs.batch_s + f.batch * costs.record_s))
        if failure.time_s == until_s:
            break
        t = failure.time_s
        bases = [max(s for s, at in durable if at <= t)]
        survives = failure.node is None
        if survives:
            bases.append(max(s for s, at in memory if at <= t))
        memory = [(s, at) for s, at in memory if survives and at <= t] or [(-1, 0.0)]
        durable = [(s, at) for s, at in durable if at <= t]
        base = max(bases)
        reach = base
        if f.delta:
            logged = step if survives else max([since, *(s for s, at in written if at <= t)])
            reach = max(base, logged)
        written = [(reach, t)]
        in_memory = len(bases) > 1 and bases[1] == base
        lost, replayed = lost + step - reach, replayed + reach - base
        step = reach
        taken = cluster.restart_s + (costs.memory_load_s if in_memory else costs.durable_load_s)
        batches = -(-(reach - base) // (f.batch or 1))
        resume = t + taken + (reach - base) * costs.replay_s + batches * costs.open_s
    return step, lost, replayed


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(
        [
            *FREQUENCIES,
            Frequencies(durable=7),
            Frequencies(durable=50, memory=3, delta=1, batch=2),
            Frequencies(memory=5),
        ]
    ),
    st.lists(st.tuples(st.floats(1, 20_000), st.booleans()), max_size=12),
)
def test_step_by_step(f: Frequencies, told: list[tuple[float, bool]]) -> None:
    costs = Costs(
        1.0, durable_stall_s=2.0, durable_s=50.0, durable_load_s=30.0, memory_stall_s=0.25, memory_s=3.0,
        memory_load_s=5.0, record_stall_s=0.125, record_s=0.05, batch_s=0.5, replay_s=0.25, open_s=0.25,
    )  # fmt: skip
    cluster = Cluster(devices=8)
    failures = [Failure(t, 0 if gone else None) for t, gone in sorted(told)]
    found = simulate(Strategy("x", costs, Fixed(f)), cluster, failures, 25_000.0)
    steps, lost, replayed = step_by_step(costs, f, cluster, failures, 25_000.0)
    assert (found.training_s, found.lost_steps, found.replayed_steps) == (steps, lost, replayed)
    assert adds_up(found)


# -- what is compared -----------------------------------------------------------------------------


def test_a_failure_while_recovering() -> None:
    """It begins anew; nothing is lost twice."""
    costs = Costs(1.0, 0.0, 0.0, durable_load_s=10.0)
    strategy = Strategy("x", costs, Fixed(Frequencies(durable=10)))
    cluster = Cluster(devices=8, restart_s=50.0)
    found = simulate(strategy, cluster, [Failure(100.5), Failure(130.5)], 200.5)
    assert (found.training_s, found.lost_steps) == (110, 0)
    assert found.recovering_s == pytest.approx(30 + 60)
    assert found.lost_s == pytest.approx(0.5)


class Scripted:
    """The next frequencies after each failure."""

    def __init__(self, *then: Frequencies) -> None:
        self.then = list(then)

    @property
    def frequencies(self) -> Frequencies:
        return self.then[0]

    def after(self, failure: Failure, step: int, num_steps: int, seconds: float) -> None:
        self.then.pop(0)


@pytest.mark.parametrize(("node", "lost"), [(None, 5), (0, 5 + 30)])
def test_a_log_with_a_gap_is_not_replayed(node: int | None, lost: int) -> None:
    """Records up to step 10, a snapshot of step 15, records from there: of no use without it."""
    costs = Costs(1.0, 0.0, 0.0, 0.0)
    logged = Frequencies(durable=1000, delta=1, batch=1)
    script = Scripted(logged, Frequencies(durable=1000, memory=15), logged, logged)
    failures = [Failure(10.5), Failure(20.5), Failure(36.0, node)]
    cluster = Cluster(devices=8, restart_s=0.0)
    found = simulate(Strategy("x", costs, script), cluster, failures, 37.0)
    assert found.lost_steps == lost


def test_nothing_fails() -> None:
    for strategy in strategies(Cluster(devices=10), Auto(mtbf_hours=5000)):
        found = simulate(strategy, Cluster(devices=10), [], DAY_S)
        assert found.effective > 0.99 and not found.failures and adds_up(found)


@pytest.mark.parametrize("shape", [0.7, 1.0])
@pytest.mark.parametrize("state", [2e9, 16e9])
def test_holdfast_is_not_worse(state: float, shape: float) -> None:
    """Within 1 % of the best of the others, whose frequencies are made for that cluster, or better."""
    for devices in (100, 10_000, 100_000):
        cluster = Cluster(devices=devices, state_bytes=state, storage_bytes_per_s=5e12)
        failures = random_failures(cluster, 10 * DAY_S, shape=shape)
        made = strategies(cluster, Auto(mtbf_hours=cluster.mtbf_s / 3600))
        found = {s.name: simulate(s, cluster, failures, 10 * DAY_S) for s in made}
        best = max(o.effective for name, o in found.items() if name != "holdfast")
        assert found["holdfast"].effective > best - 0.01
        assert found["holdfast"].saving_s / found["holdfast"].wall_s <= 0.03
        assert all(adds_up(o) for o in found.values())


def test_an_estimated_rate_does_as_well_as_the_true_one() -> None:
    cluster = Cluster(devices=10_000)
    failures = random_failures(cluster, 30 * DAY_S)
    given_it, estimates = (
        simulate(strategies(cluster, auto)[-1], cluster, failures, 30 * DAY_S)
        for auto in (Auto(mtbf_hours=cluster.mtbf_s / 3600), Auto())
    )
    assert estimates.effective == pytest.approx(given_it.effective, abs=0.003)
    assert estimates.changes and "estimated" in estimates.changes[-1].why


def test_the_same_seed_gives_the_same_run() -> None:
    cluster = Cluster(devices=10_000)
    found = [
        simulate(strategies(cluster, Auto())[-1], cluster, random_failures(cluster, DAY_S), DAY_S)
        for _ in range(2)
    ]
    assert found[0] == found[1]


def test_a_hundred_thousand_devices_for_months_take_seconds() -> None:
    started = time.process_time()
    cluster = Cluster(devices=100_000)
    until_s = 60 * DAY_S
    failures = random_failures(cluster, until_s)
    for strategy in strategies(cluster, Auto(mtbf_hours=0.5)):
        assert simulate(strategy, cluster, failures, until_s).failures == len(failures) > 2500
    assert time.process_time() - started < 10


# -- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [0.6, 1.0, 3.0])
def test_times_between_failures(shape: float) -> None:
    cluster = Cluster(devices=1, device_mtbf_hours=1.0, node_share=0.25)
    found = random_failures(cluster, 20_000 * 3600.0, shape=shape)
    times = np.array([f.time_s for f in found])
    assert len(times) == pytest.approx(20_000, rel=0.04)
    assert (np.diff(times) > 0).all()
    gaps = np.diff(times) / 3600
    spread = math.sqrt(math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2 - 1)
    assert gaps.std() == pytest.approx(spread, rel=0.06)
    assert np.mean([f.node is not None for f in found]) == pytest.approx(0.25, abs=0.02)


def test_too_many_failures() -> None:
    with pytest.raises(UsageError, match="too many"):
        random_failures(Cluster(devices=100_000, device_mtbf_hours=0.01), DAY_S)


def test_traces() -> None:
    rng = np.random.default_rng(0)
    text = "# of our cluster\nhours, kind ,node\n2.5,node,3\n1,process,\n4,node,\n"
    found = from_trace("x.csv", text, rng, num_nodes=4)
    assert found[:2] == [Failure(3600.0), Failure(9000.0, 3)]
    assert found[2].node in range(4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.csv has the columns of nothing"),
        ("when,what\n1,node\n", "x.csv has the columns when, what"),
        ("hours,kind\n1,nod\n", "failure 1: 'nod' is no kind"),
        ("hours,kind\n1,process\nx,process\n", "failure 2: hours and node are numbers"),
        ("hours,kind\n-1,process\n", "hours from 0 on"),
        ("hours,kind\nnan,process\n", "hours from 0 on"),
        ("hours,kind,node\n1,node,4\n", "nodes from 0 to 3"),
    ],
)
def test_traces_that_are_none(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_trace("x.csv", text, np.random.default_rng(0), num_nodes=4)


@pytest.mark.parametrize("name", ["devices", "step_s", "restart_s", "node_share", "record_stall"])
def test_clusters_that_are_none(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        Cluster(**{"devices": 8, name: -1})  # type: ignore[arg-type]


def test_rates_are_those_of_the_job() -> None:
    rates = Cluster(devices=1000, device_mtbf_hours=50_000, node_share=0.2).rates(8)
    assert rates.process == pytest.approx(0.8 / 50 / 3600)
    assert isinstance(rates, Rates) and rates.node == pytest.approx(0.2 / 50 / 3600)
