"""The wasted-time model: what frequencies cost, in seconds per second of training.

Saves and records stall training; a failure costs loading a base, replaying records, and training the
steps again that were not recorded.  With one kind of failure, a full save every 1/f seconds and a batch
of records every b seconds (after LowDiff, Yao et al., 2025; M is the job's mean time between failures, C
the stall of a full save, L the time to load it, R to replay a batch):

    T_w / T = (b/2 + L + R/2 (1/(f b) - 1)) / M + C f
    f* = (R / (4 C^2 M^2))^(1/3)        b* = (2 C R M)^(1/3)        so that f* b*^2 = R

(`tests/policy/test_wasted.py` has these formulas.)  holdfast has two bases and replays step by step, so in
`wasted`:

* A failure recovers from the newest base that survives it: in memory, or in storage if a lost node loses
  the snapshots in memory.
* Replaying a batch of b records takes open + b * replay, not a constant.
* A record survives process failures once it is in the queue, and node losses once its batch is written.

Failures are assumed to be rare: failures during recoveries are ignored here; the simulator counts them.

`choose_frequencies` minimises the waste over whole steps, within the allowed overhead.  It searches batch
and memory periods on a grid: every number of steps up to 16, then 10 % apart, which is within 0.5 % of
the best because waste is flat there.  The durable period follows in closed form.  Each period is at least
so long that one save ends before the next begins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from math import ceil, inf
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Frequencies:
    """Periods in steps; None: never.  `delta` is 1 or None: a log with gaps cannot be replayed."""

    durable: int | None = None
    memory: int | None = None
    delta: int | None = None
    batch: int | None = None
    """Records per batch."""

    def __str__(self) -> str:
        named = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return ", ".join(f"{name} {n}" for name, n in named if n is not None) or "none"

    @property
    def valid(self) -> bool:
        """True if a batch fits between two bases (f b <= 1), and batches are set if and only if records
        are."""
        bases = [n for n in (self.durable, self.memory) if n is not None]
        if (self.delta is None) != (self.batch is None):
            return False
        return self.batch is None or all(self.batch <= n for n in bases)


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs in seconds.  Training waits for stalls; the other costs are in the background."""

    step_s: float
    """A training step by itself."""
    durable_stall_s: float
    durable_s: float
    """From the step to the commit."""
    durable_load_s: float
    memory_stall_s: float = 0.0
    memory_s: float = 0.0
    """Until a snapshot is protected."""
    memory_load_s: float = 0.0
    record_stall_s: float = 0.0
    record_s: float = 0.0
    """To write a record's bytes with its batch."""
    batch_s: float = 0.0
    """To write a batch, beyond its records' bytes: open and fsync."""
    batch_stall_s: float = 0.0
    replay_s: float = 0.0
    """To replay one step."""
    open_s: float = 0.0
    """To open and read a batch, beyond replaying its steps."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Failures of the job per second, by kind."""

    process: float
    node: float
    beyond: float = 1.0
    """Share of node losses that snapshots in memory do not survive."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """A class of failures: its rate, the base that it recovers from, and whether the queue is lost."""

    rate: float
    in_memory: bool
    queue_lost: bool


@dataclass(frozen=True, slots=True)
class Waste:
    """Wasted seconds per second of training."""

    saving: float
    """The overhead: stalls, with or without failures."""
    lost: float
    """Steps that are trained again."""
    replaying: float
    loading: float

    @property
    def total(self) -> float:
        return self.saving + self.lost + self.replaying + self.loading


def recoveries(rates: Rates, in_memory: bool) -> tuple[Recovery, Recovery, Recovery]:
    """The recoveries if processes die; if snapshots in memory survive the loss of a node; and if they do
    not."""
    return (
        Recovery(rates.process, in_memory, False),
        Recovery(rates.node * (1 - rates.beyond), in_memory, True),
        Recovery(rates.node * rates.beyond, False, True),
    )


def wasted(costs: Costs, rates: Rates, f: Frequencies) -> Waste:
    """The waste of these frequencies; infinite without a durable period, if memory can be lost."""
    assert f.valid, f
    return Waste(*map(float, terms(costs, rates, f.durable or inf, f.memory, f.batch)))


def terms(c: Costs, rates: Rates, durable: Any, memory: Any, batch: Any) -> tuple[Any, ...]:
    """The fields of `Waste`, for periods in steps that are numbers or arrays of numpy."""
    s = c.step_s
    saving, lost, replaying, loading = c.durable_stall_s / durable, 0.0, 0.0, 0.0
    if memory is not None:
        saving = saving + c.memory_stall_s / memory
    if batch is not None:
        saving = saving + c.record_stall_s + c.batch_stall_s / batch
    for r in recoveries(rates, memory is not None):
        if not r.rate:
            continue
        late_s = c.memory_s - c.memory_stall_s if r.in_memory else c.durable_s - c.durable_stall_s
        period = memory if r.in_memory else durable
        age = period / 2 + max(late_s, 0) / s  # of the base, in steps
        tail = age
        if batch is not None and r.queue_lost:
            tail = np.minimum(batch / 2 + (c.batch_s + batch * c.record_s) / s, age)
        elif batch is not None:
            tail = 0.5
        lost = lost + r.rate * s * tail
        if batch is not None:
            replaying = replaying + r.rate * (c.replay_s + c.open_s / batch) * (age - tail)
        loading += r.rate * (c.memory_load_s if r.in_memory else c.durable_load_s)
    return saving / s, lost, replaying, loading


def best_period(stall_s: float, step_s: float, rate: float, step_of_age_s: Any) -> Any:
    """The number of steps P between bases that minimises stall / (P step) + rate * P/2 * step_of_age.

    A base that is one step older costs `step_of_age_s` more at a failure: the step itself, or its replay.
    For step_of_age = step this is Young's sqrt(2 C M).
    """
    return (2 * stall_s / (step_s * rate * step_of_age_s)) ** 0.5


def with_knob(f: Frequencies, knob: str, to: Frequencies) -> Frequencies:
    """`f` with one frequency as in `to`; `delta` and `batch` change together."""
    if knob in ("delta", "batch") and f.delta != to.delta:
        return replace(f, delta=to.delta, batch=to.batch)
    return replace(f, **{knob: getattr(to, knob)})


# -- the best frequencies -------------------------------------------------------------------------


MAX_BATCH = 1024

_Grid = np.ndarray


def choose_frequencies(
    costs: Costs,
    rates: Rates,
    tiers: Collection[str],
    *,
    overhead: float,
    rarest: int,
    most_batch: int = MAX_BATCH,
) -> Frequencies | None:
    """The best frequencies; None if even a durable save every `rarest` steps exceeds the overhead.

    `tiers`: `memory` and `delta`, used if that wastes less; the durable tier is always used.  `most_batch`:
    the number of records that memory holds.
    """
    best, least = None, np.inf
    for memory in (False, True)[: 1 + ("memory" in tiers)]:
        for delta in (False, True)[: 1 + ("delta" in tiers)]:
            for total, found in _with(costs, rates, memory, delta, overhead, rarest, most_batch):
                if total < least:
                    best, least = found, total
    return best


def floors(costs: Costs) -> tuple[int, int, int]:
    """The shortest durable period, memory period and batch for which one ends before the next begins.

    A batch of b must be written within b steps; MAX_BATCH + 1 if storage is too slow for the records.
    """
    spare = costs.step_s - costs.record_s
    batch = max(1, ceil(costs.batch_s / spare)) if spare > 0 else MAX_BATCH + 1
    return _steps(costs.durable_s, costs.step_s), _steps(costs.memory_s, costs.step_s), batch


def _steps(seconds: float, step_s: float) -> int:
    return max(1, ceil(seconds / step_s))


def _with(
    c: Costs, rates: Rates, memory: bool, delta: bool, overhead: float, rarest: int, most_batch: int
) -> Iterator[tuple[float, Frequencies]]:
    """Yield the least waste and its frequencies with exactly these tiers; nothing if none are allowed."""
    least_d, least_m, least_b = floors(c)
    periods = _grid(least_m, max(least_m, rarest)) if memory else np.array([np.nan])
    largest = min(MAX_BATCH, most_batch, max(least_d, rarest))
    batches = _grid(least_b, largest) if delta else np.array([np.nan])
    if not len(batches):
        return
    m, b = (a.ravel() for a in np.meshgrid(periods, batches, indexing="ij"))
    mem, bat = m if memory else None, b if delta else None
    without_durable = terms(c, rates, np.inf, mem, bat)
    others = without_durable[0] + np.zeros(len(m))  # the overhead
    least = np.fmax(np.maximum(_shortest(c, overhead - others), max(least_d, 1)), b)
    fits = (others <= overhead) & (least <= max(rarest, least_d)) & ~(b > m)
    if not fits.any():
        return
    m, b, least = m[fits], b[fits], least[fits]
    mem, bat = m if memory else None, b if delta else None
    rate = sum(r.rate for r in recoveries(rates, memory) if not r.in_memory)
    age_s = c.replay_s + c.open_s / b if delta else np.full(len(m), c.step_s)
    with np.errstate(divide="ignore", invalid="ignore"):
        ideal = np.nan_to_num(best_period(c.durable_stall_s, c.step_s, rate, age_s) if rate
                              else np.full(len(m), np.inf), nan=1.0, posinf=float(rarest))  # fmt: skip
    for d in (np.floor(ideal), np.floor(ideal) + 1):
        d = np.maximum(np.minimum(d, rarest), least)
        total = sum(terms(c, rates, d, mem, bat))
        i = int(np.argmin(total))
        of_memory = int(m[i]) if memory else None
        of_records = (1, int(b[i])) if delta else (None, None)
        yield float(total[i]), Frequencies(int(d[i]), of_memory, *of_records)


def _shortest(c: Costs, spare: Any) -> Any:
    """The shortest durable periods whose stalls fit into the `spare` overhead."""
    with np.errstate(divide="ignore", invalid="ignore"):
        allowed = c.durable_stall_s / c.step_s / np.maximum(spare, 0)
    allowed = np.nan_to_num(allowed, nan=1.0, posinf=np.inf)  # 0 / 0: durable saves have no stall
    return np.ceil(allowed - 1e-9)


def _grid(least: int, most: int) -> _Grid:
    """Whole numbers from `least` to `most`: all up to 16, then 10 % apart."""
    if least > most:
        return np.array([])
    far = 17 * 1.1 ** np.arange(0, max(0, ceil(np.log(max(most, 17) / 17) / np.log(1.1))) + 1)
    all_of_them = np.unique(np.concatenate([np.arange(1, 17), np.rint(far), [least, most]]))
    return all_of_them[(all_of_them >= least) & (all_of_them <= most)]
