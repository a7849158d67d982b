"""Tensors of the host that a device writes to: in page-locked memory, or in memory that bitsandbytes pages.

A copy into page-locked memory returns before it is made (`non_blocking=True`), as where an optimizer's
states are offloaded.  So whoever reads such a tensor waits for the devices first.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from holdfast.live.state.devices import devices_in_use, wait_for


def wait_for_writers(tensors: Iterable[torch.Tensor]) -> None:
    """Block until devices have done what they were given, if one of these tensors is theirs to write."""
    devices = devices_in_use()
    if devices and any(map(_is_managed, tensors)):
        wait_for(devices)


def _is_managed(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and (getattr(tensor, "is_paged", False) or tensor.is_pinned())
