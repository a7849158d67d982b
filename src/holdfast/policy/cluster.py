"""A job on a cluster, as the simulator assumes it, and what saving costs there by each strategy.

The defaults are assumptions, each with its reason; `holdfast simulate` prints them.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.errors import UsageError
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
    """From a failure until state is loaded."""
    repair_s: float = 600.0
    """Until a lost node is replaced and its group protected again."""

    def __post_init__(self) -> None:
        for name in ("devices", "devices_per_node"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)}: there must be one at least")
        for name in ("device_mtbf_hours", "step_s", "state_bytes", "node_storage_bytes_per_s",
                     "storage_bytes_per_s", "host_bytes_per_s", "network_bytes_per_s"):  # fmt: skip
            if not 0 < getattr(self, name) < float("inf"):
                raise UsageError(f"{name} {getattr(self, name):g}: must be positive")
        for name in ("record_bytes", "stall_s", "commit_s", "restart_s", "repair_s"):
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
