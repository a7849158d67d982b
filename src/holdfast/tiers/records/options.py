"""The user's options for the differential tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.base.arguments import choice_of, count_of, seconds_of
from holdfast.base.sizes import size_of

MAX_SLOTS = 1 << 20
"""Most records in memory: each takes some bytes of bookkeeping besides."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A record of every step: the gradient that the optimizer used, and what else changed.

    `batch`: records per file; what is not yet in a file outlives the training process, but not the node.
    `queue`: records that may wait for storage, in host memory (each is as large as this rank's part of the
    gradients).  `when_full`: whether training waits then (`"wait"`), or the records end until storage
    has taken those that wait, and begin again with a full save, made then (`"drop"`).  `max_bytes`: what
    all ranks' records may take in storage, in bytes or as `"200GiB"`: full saves are made for older records
    to go; None: as much as lies between full saves that are kept.  `upload_every_s`: how often records are
    copied to the home behind the root, if there is one (`Checkpointer(upload=)`); they are what is lost
    with the root.  `device_bytes`: memory of each device for copies of gradients that the next backward
    pass writes to (DDP's buckets, `zero_grad(set_to_none=False)`), in bytes or as `"2GiB"`: where they do
    not fit, the device waits for their way to the host.
    """

    batch: int = 1
    queue: int = 3
    when_full: Literal["wait", "drop"] = "wait"
    max_bytes: int | str | None = None
    upload_every_s: float = 10.0
    device_bytes: int | str = 0

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
        """Records in memory: a batch being written, and those that wait or are being filled."""
        return self.batch + self.queue

    @property
    def most_device_bytes(self) -> int:
        """`device_bytes` as a number."""
        return size_of(self.device_bytes, "Delta", "device_bytes", or_zero=True)

    @property
    def bound(self) -> int:
        """`max_bytes` as a number; 0: none."""
        return 0 if self.max_bytes is None else size_of(self.max_bytes, "Delta", "max_bytes")
