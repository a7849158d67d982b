"""The settings of the memory tier that a user gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.base.arguments import choice_of, count_of, flag_of, seconds_of, text_of
from holdfast.base.entry import options, public
from holdfast.base.errors import UsageError
from holdfast.base.sizes import size_of
from holdfast.policy.redundancy import RECOMPUTE, parse


@options
@dataclass(frozen=True, slots=True)
class Memory:
    """Snapshots in host memory.

    `redundancy`: what is kept against the loss of nodes.  `none`; `copy`, or `copy(r)` for r copies in
    all; `parity`, which survives the loss of one node of a group with the least memory; `rs(m)`, which
    survives any m; `recompute`, a copy whose optimizer states are not fetched but recomputed from gradients
    (for ZeroRedundancyOptimizer); `auto`: parity with three nodes or more, a copy with two, as far as the
    budget holds it.  `budget`: host memory that this job's snapshots on a node may take, in bytes or as
    `"64GiB"`; by default half of what the node, or the container, has.  `bandwidth`: bytes per second
    (`"2GB"`) that each rank's protection and durable saves may take together in the background; by default
    without limit, but writes to storage have low priority.  `carry`: memory, on the tensors' own device,
    for what is not copied when the optimizer's step comes: the snapshot is then spread over the next steps
    instead of holding up this one.
    `flush_after_s`: seconds after the last process of a node died at which its agent sends the newest
    snapshot to storage; None: never.  `feed`: what goes to the host: the `"state"` itself at each snapshot,
    or every step's `"gradient"`, from which a replica on the host makes the state.
    `prove_every`: with `feed="gradient"`, one durable save of this number is of the live state, and the
    replica is compared with it; the others copy from the device only what the replica lacks.
    `tls`: traffic between nodes is encrypted (needs `torch-holdfast[tls]`); slower.
    """

    redundancy: str = "auto"
    budget: int | str | None = None
    bandwidth: int | str | None = None
    carry: int | str | None = None
    flush_after_s: float | None = None
    feed: Literal["state", "gradient"] = "state"
    prove_every: int = 1
    tls: bool = False

    @public
    def __post_init__(self) -> None:
        parse(text_of(self.redundancy, "Memory", "redundancy"))
        choice_of(self.feed, ("state", "gradient"), "Memory", "feed")
        flag_of(self.tls, "Memory", "tls")
        object.__setattr__(self, "prove_every", count_of(self.prove_every, "Memory", "prove_every"))
        if self.feed == "gradient" and self.recomputes:
            raise UsageError(
                'Memory(feed="gradient") has no use for redundancy="recompute"',
                hint="choose copy or parity",
            )
        if self.prove_every > 1 and self.feed != "gradient":
            raise UsageError(
                f'Memory(prove_every={self.prove_every}) needs feed="gradient": without it there is '
                "no replica to compare",
                hint='set feed="gradient", or leave out prove_every',
            )
        _ = self.budget_bytes, self.bytes_per_s, self.carry_bytes
        if self.flush_after_s is not None:
            after_s = seconds_of(self.flush_after_s, "Memory", "flush_after_s")
            object.__setattr__(self, "flush_after_s", after_s)

    @property
    def recomputes(self) -> bool:
        """True if protection recomputes optimizer states from gradients."""
        return self.redundancy == RECOMPUTE

    @property
    def budget_bytes(self) -> int:
        """`budget` in bytes; 0: the default."""
        return self._bytes("budget")

    @property
    def bytes_per_s(self) -> int:
        """`bandwidth` in bytes per second; 0: no cap."""
        return self._bytes("bandwidth")

    @property
    def carry_bytes(self) -> int:
        """`carry` in bytes; 0: nothing is carried over."""
        return self._bytes("carry")

    def _bytes(self, name: str) -> int:
        given = getattr(self, name)
        return 0 if given is None else size_of(given, "Memory", name, or_zero=name == "carry")
