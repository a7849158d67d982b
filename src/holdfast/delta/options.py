"""What a user says of the differential tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.errors import UsageError


@dataclass(frozen=True, slots=True)
class Delta:
    """A record of every step: the gradient that the optimizer used, and what else changed.

    `batch`: records per file; what is not yet in a file outlives the training process, but not the node.
    `queue`: records that may wait for storage, in host memory (each is as large as this rank's part of the
    gradients).  `when_full`: whether training waits then (`"wait"`), or the records end until the next
    full save, which is made at once (`"drop"`).
    """

    batch: int = 1
    queue: int = 3
    when_full: Literal["wait", "drop"] = "wait"

    def __post_init__(self) -> None:
        for name in ("batch", "queue"):
            n = getattr(self, name)
            if not isinstance(n, int) or n < 1:
                raise UsageError(f"Delta({name}={n!r}): must be a positive number")
        if self.when_full not in ("wait", "drop"):
            raise UsageError(f"Delta(when_full={self.when_full!r}): must be wait or drop")

    @property
    def slots(self) -> int:
        """Records in memory: a batch being written, and those that wait or are being filled."""
        return self.batch + self.queue
