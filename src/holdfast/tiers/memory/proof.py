"""The comparisons of a replica on the host with the live state.

A replica is compared after it has learned, and at durable saves.  If training runs on CPUs, the two must be
equal bit for bit.  A device may compute in another way than the host: there the first difference counts as
rounding if it is small, and every step that is saved from the replica states it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.live.saving.exactness import Exactness

MOST_DRIFT = 1e-3
"""Largest difference, as a share of a tensor's largest element, that the first comparison after
learning may find: a larger one is no rounding on any device."""
ROUNDINGS = 4
"""Number of roundings to its dtype by which an element may differ then: one of bfloat16 is 0.8 %."""


def most_drift(dtype: torch.dtype) -> float:
    """Return the largest share for tensors of a dtype: `MOST_DRIFT`, or `ROUNDINGS` if these are more."""
    eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    return max(MOST_DRIFT, ROUNDINGS * eps)


@dataclass
class Proof:
    """The comparisons of one replica with the live state."""

    every: int = 1
    """One of this number of durable saves is of the live state."""
    is_on_device: bool = False
    """True if the training computes on a device, and the replica on the host."""
    is_passed: bool = False
    """True if the replica has passed a comparison since it last learned."""
    drift: float | None = None
    """The largest difference that was seen, if any."""
    compared: int = 0
    """The step of the last comparison."""
    num_durable: int = 0
    """Number of durable saves so far: the same on all ranks."""
    is_owed: bool = False
    """True if durable saves are to be of the live state until the replica was compared with one."""
    is_next: bool = False
    """True if the next durable save is of the live state."""

    def count_durable(self, *, must_prove: bool) -> None:
        """Count the next durable save, and decide whether it is of the live state: only once, as the
        comparison with an earlier one may end at any moment."""
        self.num_durable += 1
        if must_prove or self.num_durable % self.every == 0:
            self.is_owed = True
        self.is_next = self.is_owed

    def passes(self, most: float, share: float, *, differs: bool) -> bool:
        """Note a comparison; False if the replica has to learn anew.

        `most`: the largest difference; `share`: the largest relative to what its tensor may differ by.
        """
        if not differs:
            self.is_passed = True
            self.drift = self.drift if self.is_on_device else None
            return True
        self.drift = max(self.drift or 0.0, most)
        if self.is_on_device and not self.is_passed and share <= 1:
            self.is_passed = True
            return True
        return False

    @property
    def exactness(self) -> Exactness:
        """Exactness of the snapshots from the replica."""
        is_exact = not self.is_on_device and self.drift is None
        return Exactness(is_exact, self.drift or 0.0, self.compared)
