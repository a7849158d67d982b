"""Simulation of a job with failures: its effective training time ratio, by strategy.

The clock jumps from failure to failure.  Between two failures, steps have equal length and stalls come at
multiples of the periods, so the job's position at any time is computed, not stepped through: months on
100,000 devices take milliseconds per thousand failures.  holdfast's frequencies come from `tuning.Tuner`,
as in a real run; the other strategies have the best fixed frequencies of the model in `wasted`.

A failure may strike during a recovery, which then begins anew from the same base, unless a lost node took
it.

There are as many nodes as the job needs, and the standby nodes.  A lost node returns after its repair
time. While nodes are missing, the job waits; or it shrinks: the same global batch takes n / (n - k) of
the time on n - k nodes, and a returned node joins when the next snapshot is complete.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from holdfast.policy.cluster import GROUP, HOUR_S, Cluster, Failure
from holdfast.policy.tuning import Auto, Retuned, Tuner
from holdfast.policy.wasted import Costs, Frequencies, Rates, choose_frequencies

_RAREST_HOURS = 24.0


class Policy(Protocol):
    """Decides the frequencies; `after` is called when the job runs again after a failure."""

    @property
    def frequencies(self) -> Frequencies: ...

    def after(self, failure: Failure, step: int, num_steps: int, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Fixed frequencies."""

    frequencies: Frequencies

    def after(self, failure: Failure, step: int, num_steps: int, seconds: float) -> None:
        pass


class Tuned:
    """holdfast's tuner, in a simulated run."""

    def __init__(self, tuner: Tuner, costs: Costs) -> None:
        self.tuner = tuner
        self.changes: list[Retuned] = []
        for what in Costs.__dataclass_fields__:
            if what != "step_s":
                tuner.measured(what[:-2], getattr(costs, what))
        tuner.ran(1, costs.step_s)
        self._decide(0)

    @property
    def frequencies(self) -> Frequencies:
        return self.tuner.frequencies

    def after(self, failure: Failure, step: int, num_steps: int, seconds: float) -> None:
        if num_steps:
            self.tuner.ran(num_steps, seconds)
        self.tuner.failed("process" if failure.node is None else "node")
        self._decide(step)

    def _decide(self, step: int) -> None:
        while (change := self.tuner.decide(step)) is not None:
            self.changes.append(change)


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to protect a job: its costs, policy, group size, and what it does after a failure."""

    name: str
    costs: Costs
    policy: Policy
    group: int = 1
    in_place: bool = False
    """True if survivors keep their processes; else a launcher restarts all."""
    shrinks: bool = False
    """True if the job continues on fewer nodes when no standby node is left."""


def strategies(cluster: Cluster, auto: Auto) -> list[Strategy]:
    """Return holdfast's strategies and those it is compared with.

    `checkpoint`: the job waits for each durable save.  `async`: it waits for the copy to the host.
    `memory copy`: snapshots copied to another node's memory (as in Gemini), and asynchronous saves, at
    holdfast's stalls.  `holdfast`: durable saves, snapshots with parity in groups of 8, and records.  A
    launcher restarts these four; `in place` and `shrinking` are holdfast under `holdfast run`.
    """
    copy_s = cluster.state_bytes / cluster.host_bytes_per_s
    plain = cluster.costs()
    sync = cluster.costs(plain.durable_s)

    def tuned() -> Tuned:
        tuner = Tuner(auto, ("memory", "delta"), beyond=cluster.beyond(GROUP))
        return Tuned(tuner, plain)

    return [
        Strategy("checkpoint", sync, _fixed(sync, cluster.rates(1), ())),
        Strategy("async", cluster.costs(copy_s), _fixed(cluster.costs(copy_s), cluster.rates(1), ())),
        Strategy("memory copy", plain, _fixed(plain, cluster.rates(2), ("memory",)), 2),
        Strategy("holdfast", plain, tuned(), GROUP),
        Strategy("in place", plain, tuned(), GROUP, in_place=True),
        Strategy("shrinking", plain, tuned(), GROUP, in_place=True, shrinks=True),
    ]  # fmt: skip


def _fixed(costs: Costs, rates: Rates, tiers: tuple[str, ...]) -> Fixed:
    rarest = max(1, int(_RAREST_HOURS * HOUR_S / costs.step_s))
    found = choose_frequencies(costs, rates, tiers, overhead=1.0, rarest=rarest)
    return Fixed(found or Frequencies(durable=rarest))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a simulated job: its time by use, and its recoveries."""

    wall_s: float
    training_s: float
    """Time of the steps up to the last one, each counted once."""
    saving_s: float
    lost_s: float
    """Time of steps that were lost, with their stalls."""
    recovering_s: float
    """Waiting for nodes, restarting, loading and replaying."""
    fewer_s: float
    lost_steps: int
    replayed_steps: int
    failures: int
    from_storage: int
    """Recoveries from a durable save."""
    frequencies: Frequencies
    changes: tuple[Retuned, ...] = ()

    @property
    def effective(self) -> float:
        """The effective training time ratio."""
        return self.training_s / self.wall_s


def simulate(
    strategy: Strategy, cluster: Cluster, failures: Iterable[Failure], until_s: float
) -> Outcome:
    """Simulate one job of `until_s` seconds."""
    job = _SimulatedJob(strategy, cluster)
    for failure in failures:
        if failure.time_s >= until_s:
            break
        job.fail(failure)
    return job.outcome(until_s)


class _Run:
    """The steps since a restart, from step `first`, which began at `start_s`."""

    def __init__(self, start_s: float, first: int, c: Costs, f: Frequencies) -> None:
        self.start_s, self.first, self.costs, self.f = start_s, first, c, f
        self._each_s = c.step_s + (c.record_stall_s if f.delta is not None else 0.0)
        self._stalls = [
            (period, stall_s)
            for period, stall_s in (
                (f.durable, c.durable_stall_s),
                (f.memory, c.memory_stall_s),
                (f.batch, c.batch_stall_s),
            )
            if period and stall_s
        ]

    def done_s(self, step: int) -> float:
        """Time at which a step is complete, with all stalls before it."""
        done_s = self.start_s + (step - self.first) * self._each_s
        for period, stall_s in self._stalls:
            done_s += max(0, (step - 1) // period - self.first // period) * stall_s
        return done_s

    def at(self, time_s: float) -> int:
        """The last step that is complete at a time."""
        mean_s = self._each_s + sum(stall_s / period for period, stall_s in self._stalls)
        apart = 2 + int(2 * sum(stall_s for _, stall_s in self._stalls) / self._each_s)
        about = self.first + int(max(0.0, time_s - self.start_s) / mean_s)
        low, high = max(self.first, about - apart), about + apart
        while low < high:
            step = (low + high + 1) // 2
            low, high = (step, high) if self.done_s(step) <= time_s else (low, step - 1)
        return low

    def newest(self, period: int | None, took_s: float, time_s: float) -> int | None:
        """The newest step of a period whose save, which takes `took_s`, is complete; None if none is."""
        if not period:
            return None
        step = self.at(time_s - took_s) // period * period
        return step if step > self.first else None


@dataclass(slots=True)
class _SimulatedJob:
    """The state of a simulated job."""

    strategy: Strategy
    cluster: Cluster
    step: int = 0
    """The last complete step, from which training goes on at `resume_s`."""
    resume_s: float = 0.0
    durable: int = 0
    memory: int | None = None
    """The newest bases.  Step 0 can always be made again."""
    log: tuple[int, int] = (0, 0)
    """(since, to): steps `since + 1` to `to` are recorded."""
    lost_nodes: dict[int, float] = field(default_factory=dict)
    """Time in seconds of each node's last loss, for nodes that were lost."""
    away: list[float] = field(default_factory=list)
    """Times in seconds at which lost nodes return."""
    nodes: int = field(init=False)
    """Number of nodes that train."""
    trained: int = 0
    """Steps since the last failure."""
    saving_s: float = 0.0
    lost_s: float = 0.0
    recovering_s: float = 0.0
    fewer_s: float = 0.0
    lost_steps: int = 0
    replayed_steps: int = 0
    failures: int = 0
    from_storage: int = 0

    def __post_init__(self) -> None:
        self.nodes = self.cluster.num_nodes

    def _run(self) -> _Run:
        c = self.strategy.costs
        if self.nodes < self.cluster.num_nodes:
            c = replace(c, step_s=c.step_s * self.cluster.num_nodes / self.nodes)
        return _Run(self.resume_s, self.step, c, self.strategy.policy.frequencies)

    def train(self, until_s: float) -> _Run:
        """Train without a failure until `until_s`."""
        run = self._run()
        if until_s <= self.resume_s:
            self.recovering_s -= self.resume_s - until_s  # it is counted anew
            return run
        c, f = run.costs, run.f
        self.step = run.at(until_s)
        self.durable = run.newest(f.durable, c.durable_s, until_s) or self.durable
        self.memory = run.newest(f.memory, c.memory_s, until_s) or self.memory
        done_s, count = run.done_s(self.step), self.step - run.first
        self.trained += count
        self.fewer_s += count * (c.step_s - self.strategy.costs.step_s)
        self.saving_s += done_s - run.start_s - count * c.step_s
        self.lost_s += until_s - done_s
        return run

    def fail(self, failure: Failure) -> None:
        """Count the costs of a failure, and set the time at which training continues."""
        self._grow(failure.time_s)
        run = self.train(failure.time_s)
        self._cut_log(run, failure)
        if not self._borne(failure):
            self.memory = None
        self.away = [time_s for time_s in self.away if time_s > failure.time_s]
        if failure.node is not None:
            self.away.append(failure.time_s + self.cluster.repair_s)
        self.failures += 1
        in_place_s = self.cluster.detect_s + self.cluster.enter_s
        begin_s = in_place_s if self.strategy.in_place else self.cluster.restart_s
        self.from_storage += not self._go_on(run, failure.time_s, begin_s)
        trained, self.trained = self.trained, 0
        seconds = trained * self.strategy.costs.step_s
        self.strategy.policy.after(failure, self.step, trained, seconds)

    def _go_on(self, run: _Run, time_s: float, begin_s: float) -> bool:
        """Go back to the newest step that there is, on the nodes that there are.  True if from memory.

        `begin_s`: seconds until state can be loaded, once there are enough nodes.
        """
        c, most = self.strategy.costs, self.cluster.num_nodes
        step, base, in_memory = max(
            (self._reach(base), base, in_memory)
            for base, in_memory in ((self.durable, False), (self.memory, True))
            if base is not None
        )
        lost, replayed = self.step - step, step - base
        self.lost_steps += lost
        self.lost_s += lost * c.step_s
        self.replayed_steps += replayed
        self.step = step
        ready_s = max(time_s, self._back_s(1 if self.strategy.shrinks else most))
        self.nodes = min(most, self._nodes_at(ready_s))
        taken_s = ready_s - time_s + begin_s
        taken_s += c.memory_load_s if in_memory else c.durable_load_s
        taken_s += replayed * c.replay_s + -(-replayed // (run.f.batch or 1)) * c.open_s
        self.recovering_s += taken_s
        self.resume_s = time_s + taken_s
        return in_memory

    def _grow(self, until_s: float) -> None:
        """Let returned nodes join when the first snapshot that began after their return is complete."""
        while self.nodes < self.cluster.num_nodes:
            run = self._run()
            time_s = max(self.resume_s, self._back_s(self.nodes + 1))
            if run.f.memory:
                step = (run.at(time_s) // run.f.memory + 1) * run.f.memory
                time_s = run.done_s(step) + run.costs.memory_s
            if time_s >= until_s:
                return
            self._cut_log(self.train(time_s), Failure(time_s))
            self._go_on(run, time_s, self.cluster.enter_s)

    def _nodes_at(self, time_s: float) -> int:
        """Number of nodes at a time, standby nodes included."""
        there = self.cluster.num_nodes + self.cluster.standby_nodes
        return there - sum(back_s > time_s for back_s in self.away)

    def _back_s(self, count: int) -> float:
        """Time from which there are `count` nodes, if no other is lost."""
        over = self.cluster.num_nodes + self.cluster.standby_nodes - count
        return sorted(self.away)[-1 - over] if len(self.away) > over else 0.0

    def _cut_log(self, run: _Run, failure: Failure) -> None:
        """Cut the log to the records that are left: all, or the written ones if a node is lost."""
        since, to = self.log
        if run.f.batch is None:
            self.log = (since, min(to, run.first))
            return
        if to < run.first:
            since = run.first
        if failure.node is None:
            self.log = (since, self.step)
        else:
            write_s = run.costs.batch_s + run.f.batch * run.costs.record_s
            self.log = (since, run.newest(run.f.batch, write_s, failure.time_s) or run.first)

    def _reach(self, base: int) -> int:
        """The newest step that replay from a base reaches."""
        since, to = self.log
        return to if since <= base < to else base

    def _borne(self, failure: Failure) -> bool:
        """True if snapshots in memory survive: no other node of the group is down."""
        if failure.node is None:
            return True
        nodes = self.cluster.num_nodes
        num_groups = max(1, min(-(-nodes // self.strategy.group), nodes // 2))
        group = failure.node * num_groups // nodes
        low, high = -(-group * nodes // num_groups), -(-(group + 1) * nodes // num_groups)
        self.lost_nodes[failure.node] = failure.time_s
        since = failure.time_s - self.cluster.repair_s
        down = sum(self.lost_nodes.get(node, -1.0) >= max(since, 0.0) for node in range(low, high))
        return down == 1 and high - low > 1

    def outcome(self, wall_s: float) -> Outcome:
        self._grow(wall_s)
        self.train(wall_s)
        policy = self.strategy.policy
        return Outcome(
            wall_s=wall_s,
            training_s=self.step * self.strategy.costs.step_s,
            saving_s=self.saving_s,
            lost_s=self.lost_s,
            recovering_s=self.recovering_s,
            fewer_s=self.fewer_s,
            lost_steps=self.lost_steps,
            replayed_steps=self.replayed_steps,
            failures=self.failures,
            from_storage=self.from_storage,
            frequencies=policy.frequencies,
            changes=tuple(policy.changes) if isinstance(policy, Tuned) else (),
        )
