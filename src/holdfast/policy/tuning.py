"""Frequencies that tune themselves: costs and failures in, changes out.

    tuner = Tuner(Auto(overhead=0.03), tiers=("memory", "delta"))
    tuner.ran(1, 0.41)                          # each step, without stalls
    tuner.measured("durable_stall", 0.02)       # each cost as it occurs
    tuner.failed("process")                     # after a restart
    retuned = tuner.decide(step)                # a `Retuned` or None; tuner.frequencies is in force

A tuner has no clock and does no I/O: the same calls give the same decisions, in a run and in the simulator.
Ranks measure different times, so one rank decides for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from holdfast.base.arguments import number_of
from holdfast.base.entry import options, public
from holdfast.base.errors import UsageError
from holdfast.base.suggest import did_you_mean
from holdfast.policy.wasted import (
    MAX_BATCH,
    Costs,
    Frequencies,
    Rates,
    Waste,
    choose_frequencies,
    floors,
    wasted,
    with_knob,
)

FailureKind = Literal["process", "node"]

START = Frequencies(durable=100, memory=10, delta=1, batch=10)
"""Frequencies until costs are known."""
_KNOBS = ("durable", "memory", "delta", "batch")
_RECENT = 16
_PRIOR_HOURS = 24.0
"""Prior of the hours between failures; it weighs as much as one failure."""
_REPLAY = 0.2
"""Time to replay a step, as a share of the step's time, until it is measured."""

_COSTS = tuple(f.name[:-2] for f in fields(Costs) if f.name != "step_s")


@options
@dataclass(frozen=True, slots=True)
class Auto:
    """Frequencies by measured costs and expected failures.

    `mtbf_hours`: mean time between failures of the job; None: estimated from its failures.  `overhead`:
    the largest share of training time for saving.  `node_share`: the share of failures that lose a node's
    memory, if it is not estimated.  `gain`: the share of the wasted time that a change must be expected
    to save. `rarest_hours`: the longest time between durable saves.
    """

    mtbf_hours: float | None = None
    overhead: float = 0.03
    node_share: float = 0.5
    gain: float = 0.1
    rarest_hours: float = 24.0

    @public
    def __post_init__(self) -> None:
        for name in ("mtbf_hours", "rarest_hours"):
            if name != "mtbf_hours" or self.mtbf_hours is not None:
                self._take(name, "a positive number of hours", lambda x: 0 < x < float("inf"))
        self._take("overhead", "between 0 and 1", lambda x: 0 < x < 1, "0.03 is 3 %")
        self._take("gain", "between 0 and 1", lambda x: 0 < x < 1, "0.1 is 10 %")
        self._take("node_share", "from 0 to 1", lambda x: 0 <= x <= 1)

    def _take(
        self, name: str, expected: str, fits: Callable[[float], bool], hint: str | None = None
    ) -> None:
        found = number_of(getattr(self, name), "Auto", name, expected, fits, hint=hint)
        object.__setattr__(self, name, found)


@dataclass(frozen=True, slots=True)
class Retuned:
    """A change of one frequency: its values before and after, and the reason."""

    step: int
    knob: str
    before: Frequencies
    after: Frequencies
    why: str

    def __str__(self) -> str:
        return f"{self.knob}: {self.before} -> {self.after}: {self.why}"


@dataclass(frozen=True, slots=True)
class History:
    """The failures of a run so far and its training time; kept with its checkpoints."""

    trained_s: float = 0.0
    failures: Mapping[FailureKind, int] = field(default_factory=lambda: {"process": 0, "node": 0})

    def rates(self, auto: Auto, beyond: float) -> Rates:
        """Failures per second: with a prior of Gamma(1, 1 / p), n failures in T give (1 + n) / (1 / p +
        T)."""
        share = {"process": 1 - auto.node_share, "node": auto.node_share}
        if auto.mtbf_hours is not None:
            found = {kind: part / (auto.mtbf_hours * 3600) for kind, part in share.items()}
        else:
            prior = {kind: part / (_PRIOR_HOURS * 3600) for kind, part in share.items()}
            found = {
                kind: p * (1 + self.failures[kind]) / (1 + p * self.trained_s)  # type: ignore[index]
                for kind, p in prior.items()
            }
        return Rates(found["process"], found["node"], beyond)


class Tuner:
    """Chooses how often each tier acts.

    `tiers`: `memory` and `delta`, if the run has them; it always has the durable tier.  `beyond`: the
    probability that the loss of a node loses the snapshots in memory (`policy.survival`).
    """

    def __init__(
        self,
        auto: Auto,
        tiers: Collection[str] = (),
        *,
        beyond: float = 1.0,
        history: History | None = None,
        start: Frequencies = START,
        known: Mapping[str, float] | None = None,
    ) -> None:
        """`start`: frequencies until costs are known.  `known`: costs that an earlier run measured, used
        until this run has measured its own."""
        for tier in tiers:
            if tier not in ("memory", "delta"):
                raise UsageError(f"{tier!r} is no tier to tune: there are memory and delta")
        self.auto = auto
        self.tiers = frozenset(tiers)
        self.history = history or History()
        self.frequencies = _used(start, self.tiers)
        self.most_batch = MAX_BATCH
        """Most records of a batch: as many as memory holds."""
        self._known = {what: s for what, s in (known or {}).items() if what in _COSTS}
        self.beyond = beyond
        self._chosen: tuple[tuple[Costs, Rates, int] | None, Frequencies | None] = (None, None)
        self._step_s: deque[tuple[int, float]] = deque(maxlen=_RECENT)
        self._recent: dict[str, deque[float]] = {}

    # -- inputs -----------------------------------------------------------------------------------

    def ran(self, num_steps: int, seconds: float) -> None:
        """Add the time of `num_steps` steps, without stalls of saves and records."""
        self._step_s.append((num_steps, seconds))
        self.history = replace(self.history, trained_s=self.history.trained_s + seconds)

    def measured(self, what: str, seconds: float) -> None:
        """Add a measured cost; `what`: a field of `Costs` without its `_s`, other than `step`."""
        if what not in _COSTS:
            raise UsageError(f"{what!r} is no cost", hint=did_you_mean(what, _COSTS))
        self._recent.setdefault(what, deque(maxlen=_RECENT)).append(seconds)

    def failed(self, kind: FailureKind, count: int = 1) -> None:
        """Add `count` failures of a kind; a negative `count` takes back failures of another kind."""
        failures = {
            **self.history.failures,
            kind: max(self.history.failures[kind] + count, 0),
        }
        self.history = replace(self.history, failures=failures)

    # -- decisions ---------------------------------------------------------------------------------

    @property
    def costs(self) -> Costs | None:
        """Means of recent measurements; None while a cost without a guess is unknown.

        Guesses: loading takes as long as saving, and opening a batch as long as writing an empty one.
        """
        needed = ["durable_stall", "durable"]
        needed += ["memory_stall"] if "memory" in self.tiers else []
        needed += ["record_stall"] if "delta" in self.tiers else []
        learned = self.learned
        if not self._step_s or any(what not in learned for what in needed):
            return None
        step_s = sum(s for _, s in self._step_s) / sum(n for n, _ in self._step_s)
        guessed = {
            "durable_load": learned["durable"],
            "memory_load": learned.get("memory", 0.0),
            "replay": _REPLAY * step_s,
            "open": learned.get("batch", 0.0),
        }
        return Costs(step_s, **{f"{what}_s": s for what, s in {**guessed, **learned}.items()})

    @property
    def learned(self) -> dict[str, float]:
        """The known costs, by name."""
        recent = {
            what: list(r) for what, r in list(self._recent.items())
        }  # copies: other threads may add
        few = {what: r[0] for what, r in recent.items() if len(r) == 1}
        many = {what: _mean(r) for what, r in recent.items() if len(r) > 1}
        return {**few, **self._known, **many}

    @property
    def rates(self) -> Rates:
        return self.history.rates(self.auto, self.beyond)

    def decide(self, step: int) -> Retuned | None:
        """Change one frequency if that is worth it; takes a few milliseconds."""
        costs = self.costs
        if costs is None:
            return None
        target, limits = self._target(costs)
        now = wasted(costs, self.rates, self.frequencies)
        then = wasted(costs, self.rates, target)
        if target == self.frequencies:
            return None
        must = limits or self._cannot_stay(costs, now, then)
        if not must and now.total - then.total < self.auto.gain * now.total:
            return None
        knob = self._first_towards(target, costs)
        before, self.frequencies = self.frequencies, with_knob(self.frequencies, knob, target)
        why = must or f"wasted time goes from {now.total:.2%} to {then.total:.2%} with {target}"
        return Retuned(step, knob, before, self.frequencies, f"{why}; {self._failures()}")

    def _cannot_stay(self, costs: Costs, now: Waste, then: Waste) -> str:
        """Reason why the frequencies in force must change, whatever the gain; empty if there is none."""
        if now.saving > self.auto.overhead + 1e-9 and then.saving < now.saving:
            return f"saving takes {now.saving:.2%} of the time, {self.auto.overhead:.2%} is allowed"
        f = self.frequencies
        for name, period, least in zip(
            ("durable", "memory", "batch"), (f.durable, f.memory, f.batch), floors(costs)
        ):
            if period is not None and period < least:
                return f"{name} {period} is too often: one takes as long as {least} steps"
        if f.batch is not None and f.batch > self.most_batch:
            return f"batch {f.batch} is too large: memory holds {self.most_batch} records"
        return ""

    def _target(self, costs: Costs) -> tuple[Frequencies, str]:
        """The best frequencies and the reason; the rarest saves if none are within the overhead."""
        rarest = max(1, int(self.auto.rarest_hours * 3600 / costs.step_s))
        key = (costs, self.rates, self.most_batch)
        if self._chosen[0] != key:
            found = choose_frequencies(
                costs, self.rates, self.tiers, overhead=self.auto.overhead, rarest=rarest,
                most_batch=self.most_batch,
            )  # fmt: skip
            self._chosen = (key, found)
        found = self._chosen[1]
        if found is not None:
            return found, ""
        takes = costs.durable_stall_s / costs.step_s / rarest
        why = f"one durable save in {self.auto.rarest_hours:g} h takes {takes:.2%} of the time, "
        return Frequencies(durable=rarest), why + f"more than the {self.auto.overhead:.2%} allowed"

    def _first_towards(self, target: Frequencies, costs: Costs) -> str:
        """The frequency to change first: the one that saves most overhead, so that the overhead stays
        within its limit on the way; if none saves any, the one that then wastes least."""
        ways = {
            knob: way
            for knob in _KNOBS
            if (way := with_knob(self.frequencies, knob, target)) != self.frequencies and way.valid
        }
        waste = {knob: wasted(costs, self.rates, way) for knob, way in ways.items()}
        saving = wasted(costs, self.rates, self.frequencies).saving
        first = min(waste, key=lambda knob: waste[knob].saving)
        if waste[first].saving < saving:
            return first
        return min(waste, key=lambda knob: waste[knob].total)

    def _failures(self) -> str:
        rates = self.rates
        hours = 1 / (3600 * (rates.process + rates.node))
        how = "given" if self.auto.mtbf_hours is not None else "estimated"
        return f"a failure every {hours:.3g} h ({how})"


def _used(start: Frequencies, tiers: Collection[str]) -> Frequencies:
    """The frequencies without absent tiers, and with no batch longer than the steps between two bases."""
    memory = start.memory if "memory" in tiers else None
    if "delta" not in tiers or start.batch is None:
        return Frequencies(start.durable, memory)
    least = min(n for n in (start.durable, memory, start.batch) if n is not None)
    return Frequencies(start.durable, memory, start.delta, least)


def _mean(recent: list[float]) -> float:
    """The mean without the first value, which includes page faults of fresh memory."""
    return sum(recent[1:]) / len(recent[1:])
