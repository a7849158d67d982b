"""The frequencies that waste least, in whole steps, within the overhead that is allowed.

Batch and memory periods are searched on a grid: every number of steps up to 16, then 10 % apart, which
is within half a per cent of the best because waste is flat there.  The durable period that goes with
them is in closed form.  Each period is at least so long that saves do not overtake one another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import ceil

import numpy as np

from holdfast.policy.wasted import Costs, Frequencies, Rates, best_period, recoveries, terms

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
    """The best of these tiers, and how often; None if not even a durable save every `rarest` steps
    is allowed.

    `tiers`: of `memory` and `delta`; they are used if that wastes less.  The durable tier always
    is.  `most_batch`: the number of records that memory holds.
    """
    best, least = None, np.inf
    for memory in (False, True)[: 1 + ("memory" in tiers)]:
        for delta in (False, True)[: 1 + ("delta" in tiers)]:
            for total, found in _with(costs, rates, memory, delta, overhead, rarest, most_batch):
                if total < least:
                    best, least = found, total
    return best


def floors(costs: Costs) -> tuple[int, int, int]:
    """The shortest durable and memory periods and batch: one is done before the next is due.

    A batch of b is written within b steps; records that storage cannot keep up with give MAX_BATCH + 1.
    """
    spare = costs.step_s - costs.record_s
    batch = max(1, ceil(costs.batch_s / spare)) if spare > 0 else MAX_BATCH + 1
    return _steps(costs.durable_s, costs.step_s), _steps(costs.memory_s, costs.step_s), batch


def _steps(seconds: float, step_s: float) -> int:
    return max(1, ceil(seconds / step_s))


def _with(
    c: Costs, rates: Rates, memory: bool, delta: bool, overhead: float, rarest: int, most_batch: int
) -> Iterator[tuple[float, Frequencies]]:
    """Total waste and frequencies that are best with just these tiers; nothing if none are
    allowed."""
    least_d, least_m, least_b = floors(c)
    periods = _grid(least_m, max(least_m, rarest)) if memory else np.array([np.nan])
    batches = (
        _grid(least_b, min(MAX_BATCH, most_batch, max(least_d, rarest)))
        if delta
        else np.array([np.nan])
    )
    if not len(batches):
        return
    m, b = (a.ravel() for a in np.meshgrid(periods, batches, indexing="ij"))
    mem, bat = m if memory else None, b if delta else None
    others = terms(c, rates, np.inf, mem, bat)[0] + np.zeros(
        len(m)
    )  # the overhead without durable saves
    with np.errstate(divide="ignore", invalid="ignore"):
        allowed = c.durable_stall_s / c.step_s / np.maximum(overhead - others, 0)
    allowed = np.nan_to_num(allowed, nan=1.0, posinf=np.inf)  # 0 / 0: durable saves do not stall
    least = np.maximum(np.ceil(allowed - 1e-9), max(least_d, 1))
    least = np.fmax(least, b)
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
        yield (
            float(total[i]),
            Frequencies(
                int(d[i]),
                int(m[i]) if memory else None,
                1 if delta else None,
                int(b[i]) if delta else None,
            ),
        )


def _grid(least: int, most: int) -> _Grid:
    """Whole numbers from `least` to `most`: all up to 16, then 10 % apart."""
    if least > most:
        return np.array([])
    far = 17 * 1.1 ** np.arange(0, max(0, ceil(np.log(max(most, 17) / 17) / np.log(1.1))) + 1)
    all_of_them = np.unique(np.concatenate([np.arange(1, 17), np.rint(far), [least, most]]))
    return all_of_them[(all_of_them >= least) & (all_of_them <= most)]
