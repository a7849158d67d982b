"""The user's options for the differential tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.base.arguments import choice_of, count_of, seconds_of
from holdfast.base.entry import options, public
from holdfast.base.sizes import size_of

MAX_SLOTS = 1 << 20
"""Number of records in memory, at most: each needs some bytes of bookkeeping."""


@options
@dataclass(frozen=True, slots=True)
class Delta:
    """Options for records: of every step the gradient that the optimizer used, and other changed values.

    `batch`: records per file; records that are not in a file yet outlive the training process, but not the
    node.  `queue`: records that may wait for storage in host memory, each as large as this rank's part of
    the gradients.  `when_full`: if the queue is full, training waits (`"wait"`), or records end until
    storage has caught up, and begin again with a full save (`"drop"`).  `max_bytes`: the most that all
    ranks' records may take in storage, in bytes or as `"200GiB"`; full saves are made so that older records
    can go.  None: no bound but the full saves that are kept.  `upload_every_s`: seconds between copies of
    records to the home behind the root (`Checkpointer(upload=)`); if the root is lost, newer records are,
    too.  `device_bytes`: memory of each device for copies of gradients that the next backward pass writes
    to (DDP's buckets, `zero_grad(set_to_none=False)`), in bytes or as `"2GiB"`; if they do not fit, the
    device waits for their copy to the host.
    """

    batch: int = 1
    queue: int = 3
    when_full: Literal["wait", "drop"] = "wait"
    max_bytes: int | str | None = None
    upload_every_s: float = 10.0
    device_bytes: int | str = 0

    @public
    def __post_init__(self) -> None:
        for name in ("batch", "queue"):
            n = count_of(getattr(self, name), "Delta", name, most=MAX_SLOTS)
            object.__setattr__(self, name, n)
        every_s = seconds_of(self.upload_every_s, "Delta", "upload_every_s")
        object.__setattr__(self, "upload_every_s", every_s)
        choice_of(self.when_full, ("wait", "drop"), "Delta", "when_full")
        _ = self.bound, self.most_device_bytes

    @property
    def slots(self) -> int:
        """Number of records in memory: a batch being written, and those that wait or are being made."""
        return self.batch + self.queue

    @property
    def most_device_bytes(self) -> int:
        """`device_bytes` as a number."""
        return size_of(self.device_bytes, "Delta", "device_bytes", or_zero=True)

    @property
    def bound(self) -> int:
        """`max_bytes` as a number; 0: no bound."""
        return 0 if self.max_bytes is None else size_of(self.max_bytes, "Delta", "max_bytes")
