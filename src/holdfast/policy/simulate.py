"""A job with failures, simulated: which share of its time trained it, by strategy.

The clock goes from failure to failure.  Between two, steps are of equal length and stalls come at multiples
of the periods, so where the job is at any time is counted, not stepped through: months on 100,000 devices
take milliseconds for each thousand failures.  holdfast's frequencies are those of `tuning.Tuner`, the code
that a run has; the others have the best fixed frequencies that the model of `wasted` gives them.

A failure strikes recoveries too: they begin anew, and what they recovered from is still there, unless
lost nodes took it along.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.policy.cluster import GROUP, HOUR_S, Cluster, Failure
from holdfast.policy.tuning import Auto, Retuned, Tuner
from holdfast.policy.wasted import Costs, Frequencies, Rates, choose_frequencies

RAREST_HOURS = 24.0


class Policy(Protocol):
    """The one that decides how often; told of a failure as soon as the job runs again."""

    @property
    def frequencies(self) -> Frequencies: ...

    def after(self, failure: Failure, step: int, num_steps: int, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same frequencies for ever."""

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
    """A way to protect a job: its costs, the policy that decides, and how many nodes protect one
    another."""

    name: str
    costs: Costs
    policy: Policy
    group: int = 1


def strategies(cluster: Cluster, auto: Auto) -> list[Strategy]:
    """holdfast and what it is compared with.

    `checkpoint`: the job waits for each durable save.  `async`: it waits for the copy to the host.
    `memory copy`: snapshots copied to another node's memory (as in Gemini), and asynchronous saves, at
    holdfast's stalls.  holdfast: durable saves, snapshots with parity in groups of 8, and records.
    """
    copy_s = cluster.state_bytes / cluster.host_bytes_per_s
    plain = cluster.costs()
    sync = cluster.costs(plain.durable_s)
    tuner = Tuner(auto, ("memory", "delta"), beyond=cluster.beyond(GROUP), look_every=0)
    return [
        Strategy("checkpoint", sync, _fixed(sync, cluster.rates(1), ())),
        Strategy("async", cluster.costs(copy_s), _fixed(cluster.costs(copy_s), cluster.rates(1), ())),
        Strategy("memory copy", plain, _fixed(plain, cluster.rates(2), ("memory",)), 2),
        Strategy("holdfast", plain, Tuned(tuner, plain), GROUP),
    ]  # fmt: skip


def _fixed(costs: Costs, rates: Rates, tiers: tuple[str, ...]) -> Fixed:
    rarest = max(1, int(RAREST_HOURS * HOUR_S / costs.step_s))
    found = choose_frequencies(costs, rates, tiers, overhead=1.0, rarest=rarest)
    return Fixed(found or Frequencies(durable=rarest))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a simulated job.  Its time is training, saving, lost and recovering."""

    wall_s: float
    training_s: float
    """Steps that count: those that were lost and trained again count once."""
    saving_s: float
    lost_s: float
    """Steps trained in vain, with their stalls."""
    recovering_s: float
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
    """The steps since a restart: from `first` on, which began at `start_s`."""

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
        """Time at which a step is complete, with the stalls of those before it."""
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
        """The last step of a period whose save, which takes so long, is complete."""
        if not period:
            return None
        step = self.at(time_s - took_s) // period * period
        return step if step > self.first else None


@dataclass(slots=True)
class _SimulatedJob:
    """A job in the course of a simulation."""

    strategy: Strategy
    cluster: Cluster
    step: int = 0
    """The last complete step, from which training goes on at `resume_s`."""
    resume_s: float = 0.0
    durable: int = 0
    memory: int | None = None
    """The newest bases.  Step 0 can always be made again."""
    log: tuple[int, int] = (0, 0)
    """(since, to): there is a record of each step after `since`, up to `to`."""
    lost_nodes: dict[int, float] = field(default_factory=dict)
    """Seconds at which each node was last lost; only nodes that were."""
    saving_s: float = 0.0
    lost_s: float = 0.0
    recovering_s: float = 0.0
    lost_steps: int = 0
    replayed_steps: int = 0
    failures: int = 0
    from_storage: int = 0

    def train(self, until_s: float) -> _Run:
        """Train until something fails, or the simulation ends; nothing fails before."""
        run = _Run(self.resume_s, self.step, self.strategy.costs, self.strategy.policy.frequencies)
        if until_s <= self.resume_s:
            self.recovering_s -= self.resume_s - until_s  # it begins anew
            return run
        c, f = run.costs, run.f
        self.step = run.at(until_s)
        self.durable = run.newest(f.durable, c.durable_s, until_s) or self.durable
        self.memory = run.newest(f.memory, c.memory_s, until_s) or self.memory
        done_s = run.done_s(self.step)
        self.saving_s += done_s - run.start_s - (self.step - run.first) * c.step_s
        self.lost_s += until_s - done_s
        return run

    def fail(self, failure: Failure) -> None:
        """Count what a failure costs in lost, loaded and replayed steps, and set when training goes
        on."""
        c, run = self.strategy.costs, self.train(failure.time_s)
        self._cut_log(run, failure)
        if not self._borne(failure):
            self.memory = None
        step, base, in_memory = max(
            (self._reach(base), base, in_memory)
            for base, in_memory in ((self.durable, False), (self.memory, True))
            if base is not None
        )
        lost, trained, replayed = self.step - step, self.step - run.first, step - base
        self.failures += 1
        self.from_storage += not in_memory
        self.lost_steps += lost
        self.lost_s += lost * c.step_s
        self.replayed_steps += replayed
        self.step = step
        taken_s = self.cluster.restart_s + (c.memory_load_s if in_memory else c.durable_load_s)
        taken_s += replayed * c.replay_s + -(-replayed // (run.f.batch or 1)) * c.open_s
        self.recovering_s += taken_s
        self.resume_s = failure.time_s + taken_s
        self.strategy.policy.after(failure, step, trained, trained * c.step_s)

    def _cut_log(self, run: _Run, failure: Failure) -> None:
        """Cut the log to what is left of it: all that was recorded, or where a node is lost, what
        was written."""
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
        """The newest step that can be had from a base."""
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
        self.train(wall_s)
        policy = self.strategy.policy
        return Outcome(
            wall_s=wall_s,
            training_s=self.step * self.strategy.costs.step_s,
            saving_s=self.saving_s,
            lost_s=self.lost_s,
            recovering_s=self.recovering_s,
            lost_steps=self.lost_steps,
            replayed_steps=self.replayed_steps,
            failures=self.failures,
            from_storage=self.from_storage,
            frequencies=policy.frequencies,
            changes=tuple(policy.changes) if isinstance(policy, Tuned) else (),
        )
