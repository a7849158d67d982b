"""The simulator against closed forms, a simulation step by step, and itself."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.policy.cluster import Cluster, Failure, at_random, from_trace
from holdfast.policy.simulate import Fixed, Outcome, Strategy, simulate, strategies
from holdfast.policy.tuning import Auto
from holdfast.policy.wasted import Costs, Frequencies, Rates, wasted

DAY_S = 86400.0
ENOUGH = 10**6
"""Standby nodes: one is always there."""
HOLDFAST = 3
"""The place among strategies."""


def random_failures(
    cluster: Cluster, until_s: float, seed: int = 0, shape: float = 1.0
) -> list[Failure]:
    return at_random(
        np.random.default_rng(seed), mtbf_s=cluster.mtbf_s, until_s=until_s,
        num_nodes=cluster.num_nodes, node_share=cluster.node_share, shape=shape,
    )  # fmt: skip


def adds_up(o: Outcome) -> bool:
    parts = o.training_s + o.saving_s + o.lost_s + o.recovering_s + o.fewer_s
    return parts == pytest.approx(o.wall_s, rel=1e-9)


# -- against closed forms -------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("mtbf_s", [600.0, 3000.0])
def test_daly(mtbf_s: float, in_place: bool) -> None:
    """Synchronous checkpoints: Daly's exact expected time, with failures in saves and restarts too.

    Daly (2006), the complete cost function, per second of training:
    M exp(R/M) (exp((tau + delta)/M) - 1) / tau.
    """
    period, step_s, save_s, load_s, restart_s = 100, 2.0, 30.0, 40.0, 60.0
    cluster = Cluster(
        devices=1, device_mtbf_hours=mtbf_s / 3600, restart_s=restart_s, detect_s=5.0, enter_s=15.0,
        standby_nodes=ENOUGH,
    )  # fmt: skip
    costs = Costs(step_s, durable_stall_s=save_s, durable_s=save_s, durable_load_s=load_s)
    until_s = 20_000 * mtbf_s
    policy = Fixed(Frequencies(durable=period))
    found = simulate(
        Strategy("checkpoint", costs, policy, in_place=in_place), cluster,
        random_failures(cluster, until_s), until_s,
    )  # fmt: skip
    tau = period * step_s
    restart_s = 5.0 + 15.0 if in_place else restart_s
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
        devices=512, device_mtbf_hours=512 * 30.0, node_share=0.4, restart_s=0.0, repair_s=6e3,
        standby_nodes=ENOUGH,
    )  # fmt: skip
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
    cluster = Cluster(
        devices=800, device_mtbf_hours=800.0, node_share=1.0, repair_s=7200.0, standby_nodes=ENOUGH
    )
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


def poisson(mean: float, count: int) -> float:
    return math.exp(-mean) * mean**count / math.factorial(count)


@pytest.mark.soak_except("0-waits", "1-shrinks", "3-waits")
@pytest.mark.parametrize("shrinks", [False, True], ids=["waits", "shrinks"])
@pytest.mark.parametrize("standby", [0, 1, 3])
def test_nodes_that_are_away(standby: int, shrinks: bool) -> None:
    """Lost at random and back after a fixed time, as many are away as a Poisson distribution says
    (M/D/inf): the job waits while they are more than stand by, or trains on what is left."""
    cluster = Cluster(
        devices=6, devices_per_node=1, device_mtbf_hours=6.0, node_share=1.0, detect_s=0.0, enter_s=0.0,
        standby_nodes=standby, repair_s=3600.0,
    )  # fmt: skip
    until_s = 20_000 * cluster.mtbf_s
    strategy = Strategy(
        "x", Costs(1.0, 0.0, 0.0, 0.0), Fixed(Frequencies(durable=10**9, memory=1, delta=1, batch=1)),
        group=1, in_place=True, shrinks=shrinks,
    )  # fmt: skip
    found = simulate(strategy, cluster, random_failures(cluster, until_s), until_s)
    mean, nodes = cluster.repair_s / cluster.mtbf_s, cluster.num_nodes
    short = {k: poisson(mean, standby + k) for k in range(1, 40)}
    expected = sum(p * (min(k, nodes) / nodes if shrinks else 1.0) for k, p in short.items())
    assert adds_up(found)
    assert 1 - found.effective == pytest.approx(expected, rel=0.06, abs=0.002)


# -- against a simulation that takes every step ----------------------------------------------------


@dataclass
class Steps:
    """One step after the other, and everything as a list of facts."""

    costs: Costs
    f: Frequencies
    cluster: Cluster
    in_place: bool
    shrinks: bool
    step: int = 0
    lost: int = 0
    replayed: int = 0

    def __post_init__(self) -> None:
        self.resume = 0.0
        self.nodes = self.cluster.num_nodes
        self.away: list[float] = []
        self.down: list[tuple[int, float]] = []
        """(node, until when its half of the nodes bears no other loss)"""
        self.since = self.begins = 0
        """The step at the last recovery, and the one from which on there are records without a gap."""
        self.durable, self.memory, self.written = [(0, 0.0)], [(-1, 0.0)], [(0, 0.0)]
        """(step, when it holds)"""

    def there(self, now: float) -> int:
        most, away = self.cluster.num_nodes, sum(back > now for back in self.away)
        return min(most, most + self.cluster.standby_nodes - away)

    def train(self, until: float) -> None:
        while (grown := self._until(until)) is not None:
            self.recover(grown, self.cluster.enter_s, survives=True)

    def _until(self, until: float) -> float | None:
        """Train; return when nodes are to join before, if any are."""
        c, f = self.costs, self.f
        self.since, now, stall, join = self.step, self.resume, 0.0, math.inf
        each = c.step_s * self.cluster.num_nodes / self.nodes
        each += c.record_stall_s if f.delta else 0.0
        while True:
            done = now + stall + each
            if not f.memory and self.there(now) > self.nodes:
                join = now
            elif not f.memory:
                back = [at for at in self.away if at > now and self.there(at) > self.nodes]
                join = min(back, default=math.inf)
            if done > until and join >= until:
                return None
            if done > join:
                return join
            now, self.step, stall = done, self.step + 1, 0.0
            if f.durable and self.step % f.durable == 0:
                stall += c.durable_stall_s
                self.durable.append((self.step, now + c.durable_s))
            if f.memory and self.step % f.memory == 0:
                stall += c.memory_stall_s
                self.memory.append((self.step, now + c.memory_s))
                if self.there(math.nextafter(now, 0.0)) > self.nodes:  # back before it began
                    join = min(join, now + c.memory_s)
            if f.batch and self.step % f.batch == 0:
                self.written.append((self.step, now + c.batch_s + f.batch * c.record_s))

    def fail(self, failure: Failure) -> None:
        self.train(failure.time_s)
        c, node, t = self.cluster, failure.node, failure.time_s
        is_borne = True
        if node is not None:
            half = {node, node ^ 1}
            is_borne = not any(n in half - {node} and until >= t for n, until in self.down)
            self.away.append(t + c.repair_s)
            self.down.append((node, t + c.repair_s))
        begin = c.detect_s + c.enter_s if self.in_place else c.restart_s
        self.recover(t, begin, survives=node is None, is_borne=is_borne)

    def recover(self, t: float, begin: float, survives: bool, is_borne: bool = True) -> None:
        self.memory = [(s, at) for s, at in self.memory if is_borne and at <= t] or [(-1, 0.0)]
        self.durable = [(s, at) for s, at in self.durable if at <= t]
        in_memory, in_storage = (max(s for s, _ in facts) for facts in (self.memory, self.durable))
        base = reach = max(in_memory, in_storage)
        if self.f.delta:
            written = max(s for s, at in self.written if at <= t)
            end = self.step if survives else max(self.since, written)
            reach = end if self.begins <= base < end else base
            self.begins = max(self.begins, reach) if reach > end else self.begins
        self.written = [(reach, t)]
        self.lost, self.replayed = self.lost + self.step - reach, self.replayed + reach - base
        self.step = reach
        c = self.costs
        least = 1 if self.shrinks else self.cluster.num_nodes
        ready = min(at for at in (t, *self.away) if at >= t and self.there(at) >= least)
        self.nodes = self.there(ready)
        taken = begin + (c.memory_load_s if in_memory == base else c.durable_load_s)
        batches = -(-(reach - base) // (self.f.batch or 1))
        self.resume = ready + taken + (reach - base) * c.replay_s + batches * c.open_s


@settings(max_examples=60, deadline=None)
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
    st.sampled_from([(False, False), (True, False), (True, True)]),
    st.integers(0, 2),
)
@example(
    Frequencies(durable=2000, memory=40),
    [(1.0, True), (1.0, True), (772.0, False)],
    (True, True),
    0,
)
def test_step_by_step(
    f: Frequencies, told: list[tuple[float, bool]], how: tuple[bool, bool], standby: int
) -> None:
    """Numbers are such that no sum of them is rounded."""
    costs = Costs(
        3.0, durable_stall_s=2.0, durable_s=50.0, durable_load_s=30.0, memory_stall_s=0.25, memory_s=3.0,
        memory_load_s=5.0, record_stall_s=0.125, record_s=0.0625, batch_s=0.5, replay_s=0.25, open_s=0.25,
    )  # fmt: skip
    cluster = Cluster(
        devices=4, devices_per_node=1, detect_s=2.0, enter_s=1.5, standby_nodes=standby, repair_s=1500.0,
    )  # fmt: skip
    failures = [Failure(t, i % 4 if gone else None) for i, (t, gone) in enumerate(sorted(told))]
    in_place, shrinks = how
    strategy = Strategy("x", costs, Fixed(f), in_place=in_place, shrinks=shrinks)
    found = simulate(strategy, cluster, failures, 25_000.0)
    steps = Steps(costs, f, cluster, in_place, shrinks)
    for failure in failures:
        steps.fail(failure)
    steps.train(25_000.0)
    expected = (3.0 * steps.step, steps.lost, steps.replayed)
    assert (found.training_s, found.lost_steps, found.replayed_steps) == expected
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


def test_a_node_that_is_back_joins_at_the_next_snapshot() -> None:
    """Four nodes, none stands by: a minute after the loss the fourth is back, while step 25 is under way.
    The snapshot of step 28 is complete 2 s later, when half of step 29 is done, and that is lost."""
    costs = Costs(3.0, 0.0, 0.0, 0.0, memory_s=2.0, memory_load_s=5.0)
    strategy = Strategy(
        "x", costs, Fixed(Frequencies(durable=1000, memory=4)), in_place=True, shrinks=True
    )
    cluster = Cluster(
        devices=4, devices_per_node=1, detect_s=2.0, enter_s=3.0, standby_nodes=0, repair_s=60.0
    )
    failures = [Failure(49.0, node=1)]  # 1 s after step 16, whose snapshot is not complete
    found = simulate(strategy, cluster, failures, 49 + 10 + 16 * 4 + 2 + 8 + 10 * 3)
    assert adds_up(found)
    assert found.lost_steps == 16 - 12
    assert found.training_s / 3 == 12 + 16 + 10
    assert found.fewer_s == 16 * 1.0
    assert found.recovering_s == 10 + 8
    assert found.lost_s == 4 * 3.0 + 1.0 + 2.0  # steps 17 and 29
    waits = simulate(replace(strategy, shrinks=False), cluster, failures, 49 + 60 + 10 + 5 * 3)
    assert waits.training_s / 3 == 12 + 5 and waits.recovering_s == 60 + 10


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
    """Within 1 % of the best of the others, whose frequencies are made for that cluster, or better; and
    recovery in place is not worse than a restart, nor is shrinking worse than waiting."""
    for devices in (100, 10_000, 100_000):
        cluster = Cluster(devices=devices, state_bytes=state, storage_bytes_per_s=5e12)
        failures = random_failures(cluster, 10 * DAY_S, shape=shape)
        made = strategies(cluster, Auto(mtbf_hours=cluster.mtbf_s / 3600))
        found = {s.name: simulate(s, cluster, failures, 10 * DAY_S) for s in made}
        *others, best, in_place, shrinking = (o.effective for o in found.values())
        assert best > max(others) - 0.01
        assert shrinking > in_place - 0.001 and in_place > best - 0.001
        assert found["holdfast"].saving_s / found["holdfast"].wall_s <= 0.03
        assert all(adds_up(o) for o in found.values())


def test_an_estimated_rate_does_as_well_as_the_true_one() -> None:
    cluster = Cluster(devices=10_000)
    failures = random_failures(cluster, 30 * DAY_S)
    given_it, estimates = (
        simulate(strategies(cluster, auto)[HOLDFAST], cluster, failures, 30 * DAY_S)
        for auto in (Auto(mtbf_hours=cluster.mtbf_s / 3600), Auto())
    )
    assert estimates.effective == pytest.approx(given_it.effective, abs=0.003)
    assert estimates.changes and "estimated" in estimates.changes[-1].why


def test_the_same_seed_gives_the_same_run() -> None:
    cluster = Cluster(devices=10_000)
    found = [
        simulate(
            strategies(cluster, Auto())[HOLDFAST], cluster, random_failures(cluster, DAY_S), DAY_S
        )
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


@pytest.mark.parametrize(
    "name",
    ["devices", "step_s", "restart_s", "node_share", "record_stall", "enter_s", "standby_nodes"],
)
def test_clusters_that_are_none(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        Cluster(**{"devices": 8, name: -1})  # type: ignore[arg-type]


def test_rates_are_those_of_the_job() -> None:
    rates = Cluster(devices=1000, device_mtbf_hours=50_000, node_share=0.2).rates(8)
    assert rates.process == pytest.approx(0.8 / 50 / 3600)
    assert isinstance(rates, Rates) and rates.node == pytest.approx(0.2 / 50 / 3600)
