"""The times at which a simulated job fails: at random, or as a trace says.

A job of many devices fails when any of them does.  Times between its failures are exponential, or Weibull
with the same mean: shape < 1 makes them come in bursts, as they do on real machines.  What fails, processes
alone or a node, is drawn for each by itself.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from holdfast.errors import UsageError
from holdfast.near import near

KINDS = ("process", "node")
MOST = 1_000_000
"""Most failures of one run: more are not simulated."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure at a time of the job, in seconds; `node` is the one that is lost, None if processes
    only."""

    time_s: float
    node: int | None = None


def at_random(
    rng: np.random.Generator,
    *,
    mtbf_s: float,
    until_s: float,
    num_nodes: int,
    node_share: float,
    shape: float = 1.0,
) -> list[Failure]:
    """Failures of a job with that mean between two of them.  UsageError if there are too many."""
    count = until_s / mtbf_s
    if count > MOST:
        shown = f"{count:,.0f}" if count < 1e15 else f"{count:.3g}"
        raise UsageError(
            f"{shown} failures are too many to simulate",
            hint=f"at most {MOST:,}: fewer days, or a longer mean time between failures",
        )
    scale_s = mtbf_s / math.gamma(1 + 1 / shape)
    times: list[float] = []
    last = 0.0
    while last < until_s:
        gaps = scale_s * rng.weibull(shape, max(16, int((until_s - last) / mtbf_s * 1.1)))
        times += (last + np.cumsum(gaps)).tolist()
        last = times[-1]
    times = [t for t in times if t < until_s]
    lost = rng.random(len(times)) < node_share
    nodes = rng.integers(num_nodes, size=len(times))
    return [Failure(t, int(n) if gone else None) for t, gone, n in zip(times, lost, nodes)]


def from_trace(name: str, text: str, rng: np.random.Generator, num_nodes: int) -> list[Failure]:
    """Failures of a CSV text with the columns `hours` (since the start) and `kind` (process or node).

    Which node is lost is drawn, unless there is a column `node` with its number.  UsageError says what of
    the trace of that name is wrong.
    """
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    names = [column.strip() for column in rows.fieldnames or ()]
    if not {"hours", "kind"} <= set(names):
        raise UsageError(
            f"{name} has the columns {', '.join(names) or 'of nothing'}",
            hint="a trace begins with a line `hours,kind`",
        )
    rows.fieldnames = names
    return sorted(_read(name, rows, rng, num_nodes), key=lambda failure: failure.time_s)


def _read(
    name: str, rows: csv.DictReader[str], rng: np.random.Generator, num_nodes: int
) -> Iterator[Failure]:
    for row in rows:
        where = f"{name}, failure {rows.line_num - 1}"
        kind = (row["kind"] or "").strip()
        if kind not in KINDS:
            raise UsageError(
                f"{where}: {kind!r} is no kind of failure",
                hint=near(kind, KINDS) or "process or node",
            )
        node = int(rng.integers(num_nodes))
        try:
            hours = float(row["hours"])
            node = int(row.get("node") or node)
        except (TypeError, ValueError):
            raise UsageError(f"{where}: hours and node are numbers") from None
        if not 0 <= hours < math.inf or not 0 <= node < num_nodes:
            raise UsageError(f"{where}: hours from 0 on, nodes from 0 to {num_nodes - 1}")
        yield Failure(hours * 3600, node if kind == "node" else None)
