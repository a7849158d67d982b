"""The way of a device's gradients to a record, beside the training.

    gradients                                                     while they are copied
    without other owners, made anew for each step,                the training goes on: their memory is lent
    where no graph was captured and the device has room
    that stay, and are written to again, of `device_bytes` or     the training goes on: they are copied on
    less (DDP's buckets, zero_grad(set_to_none=False))            the device first, in passing
    that stay, more of them                                       the training's stream waits
    that are packed or rounded, or on the CPU                     the training's thread waits

After the copy of a lent gradient its version counter proves that it was not written meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from holdfast.live.state.devices import room_beside_peak
from holdfast.live.state.graphs import has_captured
from holdfast.live.state.optimizer_wrappers import stepping
from holdfast.live.state.writes import times_written

SURE_AT = 2
"""Number of steps with new gradients after which every step is taken to make new ones."""
ASKS_EACH = 50
"""Number of steps between two looks at a device's memory."""
TELLS_AT = 6
"""Step at which it is told that a device waits."""

Way = Literal["lent", "cloned", "stream", "thread"]


@dataclass
class Lent:
    """Tensors of devices that are on their way to a record."""

    tensors: list[torch.Tensor]
    """The gradients themselves, or copies of them on their device."""
    way: Way
    versions: list[int] = field(default_factory=list)

    @property
    def is_written(self) -> bool:
        """True if a lent tensor was written since."""
        return self.way == "lent" and list(map(times_written, self.tensors)) != self.versions


class Lender:
    """Chooses the way of each optimizer's gradients, from step to step.  On the training thread."""

    def __init__(self, device_bytes: int) -> None:
        self.device_bytes = device_bytes
        """Bytes of a device's memory that copies of gradients may take."""
        self._before: dict[str, list[StorageWeakRef]] = {}
        """The storages of each optimizer's gradients at its last step."""
        self._anew: Counter[str] = Counter()
        """Number of steps of each optimizer that were compared with the previous step."""
        self._staying: set[str] = set()
        """Optimizers of which a gradient was once the same at two steps."""
        self._room: dict[str, bool] = {}
        """True if there is memory to keep an optimizer's gradients for longer than the training does."""
        self._waits: Counter[str] = Counter()
        """Number of steps of each optimizer for whose gradients its device had to wait."""

    def forget(self) -> None:
        """Begin anew: a restore replaces gradients."""
        self._before.clear()
        self._anew.clear()

    def may_keep(self, key: str, grads: Sequence[torch.Tensor]) -> bool:
        """True if the training may go on beside copies of an optimizer's gradients, as it does not write to
        them."""
        before = self._before.get(key)
        self._before[key] = [StorageWeakRef(g.untyped_storage()) for g in grads]
        if before is not None:
            # numbers of their own, while these are held
            known = {storage.cdata for storage in before}
            if any(storage.cdata in known for storage in self._before[key]):
                self._staying.add(key)
            self._anew[key] += 1
        is_sure = self._anew[key] >= SURE_AT and key not in self._staying
        return (
            is_sure
            and not has_captured()
            and _are_nobody_elses(grads)
            and self._has_room(key, grads)
        )

    def _has_room(self, key: str, grads: Sequence[torch.Tensor]) -> bool:
        """True if gradients may stay through the next passes, beside what these have taken at most; asked
        now and then, since devices tell it slowly."""
        if key not in self._room or self._anew[key] % ASKS_EACH == 0:
            needed: Counter[torch.device] = Counter()
            for grad in grads:
                needed[grad.device] += grad.nbytes
            self._room[key] = all(room_beside_peak(d) > 1.1 * n for d, n in needed.items())
        return self._room[key]

    def wait(self, key: str, num_bytes: int) -> str:
        """Note that a device waits for the copy of an optimizer's gradients; return the text of a notice,
        once, else empty.  The first steps prove nothing."""
        self._waits[key] += 1
        if self._waits[key] != TELLS_AT:
            return ""
        return (
            f"gradients of {key} stay where they are (DDP's buckets, zero_grad(set_to_none=False)), or a "
            "graph or the device's memory has no room to keep them, so the device waits at each step until "
            f"they are copied: Delta(device_bytes={num_bytes}) copies them on the device first"
        )


def on_device(tensors: Sequence[torch.Tensor], room: int) -> Lent:
    """Copies of tensors on their device, if they take at most `room` bytes; else the tensors themselves,
    whose copy the training's stream awaits."""
    if sum(t.nbytes for t in tensors) <= room:
        try:
            copies = [torch.empty_like(t) for t in tensors]
        except torch.OutOfMemoryError:
            pass
        else:
            for device in dict.fromkeys(t.device for t in tensors):
                here = [n for n, t in enumerate(tensors) if t.device == device]
                torch._foreach_copy_([copies[n] for n in here], [tensors[n] for n in here])
            return Lent(copies, "cloned")
    return Lent([*tensors], "stream")


def _are_nobody_elses(grads: Sequence[torch.Tensor]) -> bool:
    """True if the storages have no owners but these tensors: no bucket, no view.  False if torch does not
    tell."""
    uses = getattr(torch._C, "_storage_Use_Count", None)
    if uses is None:
        return False
    alone = torch.empty(1)
    asking = alone.untyped_storage()
    of_none = uses(asking._cdata) - 1  # those of asking
    owners: dict[int, tuple[int, int]] = {}
    for grad in grads:
        storage = grad.untyped_storage()
        number, _ = owners.get(storage._cdata, (0, 0))
        owners[storage._cdata] = number + 1, uses(storage._cdata) - of_none
    return all(used <= number for number, used in owners.values())


def only_reads(optimizer: Optimizer) -> bool:
    """True if an optimizer's step is known to leave gradients as they are: torch's do, unless a fused
    kernel unscales them, or one with `nesterov` writes to them."""
    optimizer = stepping(optimizer)
    looks_ahead = any(group.get("nesterov") for group in optimizer.param_groups)  # foreach writes
    scales = getattr(optimizer, "grad_scale", None) is not None
    return is_torchs(optimizer) and not looks_ahead and not scales


def is_torchs(optimizer: Optimizer) -> bool:
    """True for torch's own optimizers: what they read, keep and write is known."""
    return type(stepping(optimizer)).__module__.startswith("torch.optim.")
