"""A job on a cluster, as the simulator assumes it: what saving costs there, and when it fails.

The defaults are assumptions, each with its reason; `holdfast simulate` prints them.

A job of many devices fails when any of them does, at random or as a trace says.  Times between its failures
are exponential, or Weibull with the same mean: shape < 1 makes them come in bursts, as they do on real
machines.  What fails, processes alone or a node, is drawn for each by itself.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from holdfast.base.errors import UsageError
from holdfast.base.suggest import did_you_mean
from holdfast.policy.survival import exponential
from holdfast.policy.wasted import Costs, Rates

HOUR_S = 3600.0
GROUP = 8
"""Nodes that protect one another: `redundancy.MAX_GROUP`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """One job.  Bytes are of one device's share of the state, with no replica of it counted twice."""

    devices: int
    devices_per_node: int = 8
    device_mtbf_hours: float = 50_000.0
    """Mean time between failures of one device; the job fails when any does."""
    node_share: float = 0.5
    """Share of the failures that take a node's memory along."""
    step_s: float = 5.0
    state_bytes: float = 2e9
    record_bytes: float = 2e7
    """1 % of the state: gradients as TopK 1 % leaves them."""
    node_storage_bytes_per_s: float = 2e9
    storage_bytes_per_s: float = 5e11
    """Limit on what all nodes together have."""
    host_bytes_per_s: float = 5e9
    """From a device to the memory of its host."""
    network_bytes_per_s: float = 2e9
    """Bandwidth of one device, from host to host."""
    stall_s: float = 0.05
    """Stall by a save or snapshot that is copied beside the next step."""
    record_stall: float = 0.01
    """Share of a step by which keeping its record holds it up."""
    replay: float = 0.2
    """Share of a step's time that it takes to replay it."""
    commit_s: float = 0.1
    """Seconds that a batch of records takes beside its bytes."""
    restart_s: float = 180.0
    """From a failure until state is loaded, where a launcher starts all processes again."""
    detect_s: float = 15.0
    """From a failure until survivors know of it, in place: torch's rendezvous strikes a node off after
    three heartbeats, 5 s apart.  A killed process is known in a tenth of a second."""
    enter_s: float = 30.0
    """From there until all ranks are in their function again, with new groups: what NCCL takes to make
    them on 10,000 GPUs (MegaScale, Jiang et al., 2024); 1 s with gloo on 4 ranks."""
    standby_nodes: int = 1
    """Nodes that wait to take the place of a lost one."""
    repair_s: float = 600.0
    """Until a lost node is replaced (as a standby node, or in the job) and its group protected again."""

    def __post_init__(self) -> None:
        for name in ("devices", "devices_per_node"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)}: there must be one at least")
        for name in ("device_mtbf_hours", "step_s", "state_bytes", "node_storage_bytes_per_s",
                     "storage_bytes_per_s", "host_bytes_per_s", "network_bytes_per_s"):  # fmt: skip
            if not 0 < getattr(self, name) < float("inf"):
                raise UsageError(f"{name} {getattr(self, name):g}: must be positive")
        for name in ("record_bytes", "stall_s", "commit_s", "restart_s", "detect_s", "enter_s",
                     "standby_nodes", "repair_s"):  # fmt: skip
            if not 0 <= getattr(self, name) < float("inf"):
                raise UsageError(f"{name} {getattr(self, name):g}: must not be negative")
        for name in ("node_share", "record_stall", "replay"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} {getattr(self, name):g}: must be from 0 to 1")

    @property
    def num_nodes(self) -> int:
        return -(-self.devices // self.devices_per_node)

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of the job, in seconds."""
        return self.device_mtbf_hours * HOUR_S / self.devices

    @property
    def bandwidth(self) -> float:
        """Bytes per second of all nodes to storage, and back."""
        return min(self.num_nodes * self.node_storage_bytes_per_s, self.storage_bytes_per_s)

    def beyond(self, group: int) -> float:
        """Probability that while a lost node is replaced another of its group is lost: one is borne."""
        others = min(group, self.num_nodes) - 1
        if others < 1:
            return 1.0
        if not self.node_share:
            return 0.0
        node_mtbf_s = self.mtbf_s * self.num_nodes / self.node_share
        return exponential(node_mtbf_s / others).failure(self.repair_s)

    def rates(self, group: int) -> Rates:
        share = self.node_share
        return Rates((1 - share) / self.mtbf_s, share / self.mtbf_s, self.beyond(group))

    def costs(self, durable_stall_s: float | None = None) -> Costs:
        """`durable_stall_s` None: a save is copied beside the next step, and holds up what is after."""
        durable_s = self.devices * self.state_bytes / self.bandwidth
        copy_s = self.state_bytes / self.host_bytes_per_s
        sent_s = self.state_bytes / self.network_bytes_per_s
        stall_s = self.stall_s + max(0.0, copy_s - self.step_s)
        return Costs(
            step_s=self.step_s,
            durable_stall_s=stall_s if durable_stall_s is None else durable_stall_s,
            durable_s=durable_s,
            durable_load_s=durable_s + copy_s,
            memory_stall_s=stall_s,
            memory_s=copy_s + sent_s,
            memory_load_s=copy_s + sent_s,
            record_stall_s=self.record_stall * self.step_s,
            record_s=self.devices * self.record_bytes / self.bandwidth,
            batch_s=self.commit_s,
            replay_s=self.replay * self.step_s,
            open_s=self.commit_s,
        )


# -- failures -------------------------------------------------------------------------------------


_KINDS = ("process", "node")
_MOST = 1_000_000
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
    if count > _MOST:
        shown = f"{count:,.0f}" if count < 1e15 else f"{count:.3g}"
        raise UsageError(
            f"{shown} failures are too many to simulate",
            hint=f"at most {_MOST:,}: fewer days, or a longer mean time between failures",
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
        if kind not in _KINDS:
            raise UsageError(
                f"{where}: {kind!r} is no kind of failure",
                hint=did_you_mean(kind, _KINDS) or "process or node",
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
