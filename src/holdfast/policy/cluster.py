"""A simulated job on a cluster: its costs of saving, and its failures.

The defaults are assumptions, each with its reason; `holdfast simulate` prints them.

A job fails when any of its devices does, at random or as in a trace.  Times between failures are
exponential, or Weibull with the same mean: shape < 1 makes bursts, as on real machines.  Whether a
failure takes a node or only processes is drawn independently.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from holdfast.base.errors import UsageError
from holdfast.base.suggest import did_you_mean
from holdfast.policy.survival import failure_within
from holdfast.policy.wasted import Costs, Rates

HOUR_S = 3600.0
GROUP = 8
"""Nodes that protect one another: `redundancy._MAX_GROUP`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """One job.  Bytes are per device, each replica of the state counted once."""

    devices: int
    devices_per_node: int = 8
    device_mtbf_hours: float = 50_000.0
    """Mean time between failures of one device; the job fails when any does."""
    node_share: float = 0.5
    """Share of the failures that lose a node's memory."""
    step_s: float = 5.0
    state_bytes: float = 2e9
    record_bytes: float = 2e7
    """A record of one step: 1 % of the state, as with TopK gradients at 1 %."""
    node_storage_bytes_per_s: float = 2e9
    storage_bytes_per_s: float = 5e11
    """Limit of all nodes together."""
    host_bytes_per_s: float = 5e9
    """From a device to the memory of its host."""
    network_bytes_per_s: float = 2e9
    """Bandwidth of one device, from host to host."""
    stall_s: float = 0.05
    """Stall of a save or snapshot that is copied during the next step."""
    record_stall: float = 0.01
    """Stall of recording a step, as a share of the step's time."""
    replay: float = 0.2
    """Time to replay a step, as a share of the step's time."""
    commit_s: float = 0.1
    """Seconds to write a batch of records, beyond the time of its bytes."""
    restart_s: float = 180.0
    """From a failure until state is loaded, if a launcher restarts all processes."""
    detect_s: float = 15.0
    """From a failure until survivors know of it, in place: torch's rendezvous drops a node after three
    missed heartbeats, 5 s apart.  A killed process is noticed within 0.1 s."""
    enter_s: float = 30.0
    """From then until all ranks are in the recoverable function again, with new process groups: NCCL takes
    that long on 10,000 GPUs (MegaScale, Jiang et al., 2024); gloo takes 1 s on 4 ranks."""
    standby_nodes: int = 1
    """Nodes that wait to replace a lost node."""
    repair_s: float = 600.0
    """From the loss of a node until it is replaced and its group protected again."""

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
        """Bytes per second of all nodes together, to and from storage."""
        return min(self.num_nodes * self.node_storage_bytes_per_s, self.storage_bytes_per_s)

    def beyond(self, group: int) -> float:
        """Probability that a second node of a group is lost while the first is replaced."""
        others = min(group, self.num_nodes) - 1
        if others < 1:
            return 1.0
        if not self.node_share:
            return 0.0
        node_mtbf_s = self.mtbf_s * self.num_nodes / self.node_share
        return failure_within(node_mtbf_s / others, self.repair_s)

    def rates(self, group: int) -> Rates:
        share = self.node_share
        return Rates((1 - share) / self.mtbf_s, share / self.mtbf_s, self.beyond(group))

    def costs(self, durable_stall_s: float | None = None) -> Costs:
        """Costs of the tiers; `durable_stall_s` None: a save stalls only if its copy outlasts a step."""
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
"""Most failures of one simulation."""


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
    """Draw the failures of a job until `until_s`.  UsageError if they would be too many."""
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
    """Read failures from a CSV text with the columns `hours` (since the start) and `kind` (process or
    node).

    An optional column `node` has the number of the lost node; else it is drawn.  UsageError states the
    error and its place in the trace `name`.
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
