"""Memory that a restore reads into: live tensors, or new ones like them.  Nothing is read here."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from holdfast.base.errors import FormatError, HoldfastError
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.rows import RAW, Array, ArrayTarget, Target
from holdfast.core.format.manifest import TensorEntry
from holdfast.core.layout import Mesh
from holdfast.live.state.arrays import array_of
from holdfast.live.state.devices import LockedPages, Moment, lock_pages
from holdfast.live.state.placed import memory_of, place, torch_dtype
from holdfast.live.state.tensor_kinds import PLAIN_TENSORS, check_kind, writing


@dataclass(frozen=True)
class RestoreOptions:
    """Options of a restore: what may differ between checkpoint and live state."""

    only: tuple[str, ...] | None = None
    cast: bool = False
    strict: bool = True
    on_resize: dict[str, str] = field(default_factory=dict)
    mesh: Mesh | None = None
    """The live mesh, if the user named one."""
    kept: list[str] = field(default_factory=list)
    """Names of live values that a restore with these options left as they were."""

    def wanted(self, name: str) -> bool:
        return self.only is None or any(fnmatchcase(name, p) for p in self.only)


@dataclass(frozen=True)
class TorchTarget:
    """A live tensor that takes values by `copy_`: on a device, or conjugated or negated lazily."""

    tensor: torch.Tensor
    dtype: torch.dtype

    def memory(self) -> memoryview | None:
        return None

    def put(self, at: tuple[slice, ...], values: Array) -> None:
        with writing(self.tensor):
            copy_in(self.tensor[at], self.dtype, values)


def target_of(local: torch.Tensor, dtype: str, name: str) -> Target:
    """The target for values of tensor `name` in a live local tensor; `dtype`: the saved one."""
    saved = torch_dtype(dtype)
    if local.dtype != saved:
        from holdfast.live.restore.casting import CastTarget

        return CastTarget(local.detach(), saved, name)
    if local.is_cpu and not (local.is_conj() or local.is_neg()):
        array = array_of(local)
        return ArrayTarget(array.view(RAW[array.itemsize]))
    return TorchTarget(local.detach(), saved)


def entry_of(checkpoint: Checkpoint, name: str) -> TensorEntry | None:
    """The manifest's entry of a tensor; None if it has none."""
    index = checkpoint.manifest.find(name)
    return None if index is None else checkpoint.manifest.tensors[index]


def is_known(checkpoint: Checkpoint, name: str) -> bool:
    """True if a tensor was saved under a name."""
    return checkpoint.manifest.find(name) is not None


def counts_stay(group: dict[str, Any]) -> bool:
    """True if torch's optimizers keep the counts of a group, states called "step", on the CPU."""
    return not (group.get("capturable") or group.get("fused"))


def empty_in(
    order: Sequence[int],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    name: str,
) -> torch.Tensor:
    """Memory for a state whose dims lie in this order.  FormatError if it is no order of the dims."""
    if sorted(order) != list(range(len(shape))):
        raise FormatError(
            f"malformed extras: {name!r} of shape {shape} lies in the order {order!r}"
        )
    outer = torch.empty([shape[d] for d in order], dtype=dtype, device=device)
    return outer.permute([list(order).index(d) for d in range(len(shape))])


def empty_alike(
    tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor | None:
    """Memory with the device and the cuts of a tensor; None if its shape differs, or if nothing can be read
    into its kind."""
    if not isinstance(tensor, DTensor) and type(tensor) not in PLAIN_TENSORS:
        return None
    try:
        check_kind(memory_of(tensor), "")
        place(tensor, "")
    except HoldfastError:
        return None
    if tuple(tensor.shape) != shape:
        return None
    return torch.empty_like(tensor, dtype=dtype, requires_grad=False)


# -- page-locked blocks ---------------------------------------------------------------------------
# Memory for values on their way to a device: two blocks for each thread that reads.
#
#    thread    read, verify A | give copies of A | read, verify B | give copies of B | wait for A; read ...
#    device                   |       A ─────────────►            |       B ───────────►
#
# So a device copies straight out of a block while the thread reads the next.  A block is used again, or
# freed, when the device has made its copies.


class _Placing(threading.local):
    """The memory that this thread copies out of."""

    is_kept = False
    """True if it stays as it is until the device has done its copies."""


_placing = _Placing()


class _LockedBlock:
    def __init__(self, size: int, devices: Sequence[torch.device]) -> None:
        self.view = memoryview(bytearray(size))
        self.copied: Moment | None = None
        self._locked: LockedPages | None = lock_pages(self.view, devices)

    def wait(self) -> None:
        """Block until devices have copied out of it."""
        copied, self.copied = self.copied, None
        if copied is not None:
            copied.wait()

    def close(self) -> None:
        self.wait()
        if self._locked is not None:
            self._locked.undo()

    def __del__(self) -> None:
        """A thread that was left behind, since storage did not answer it, may have used it later."""
        self.wait()


class LockedBlocks:
    """Blocks of the threads that read a step for some devices.  `BlockMemory`."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._mine = threading.local()
        self._all: list[_LockedBlock] = []

    @contextmanager
    def block(self, size: int) -> Iterator[memoryview]:
        """Memory of at least `size` bytes, out of which `copy_in` copies while this thread goes on."""
        blocks: list[_LockedBlock] = self._mine.__dict__.setdefault("blocks", [])
        if len(blocks) < 2:
            blocks.append(_LockedBlock(size, self._devices))
            self._all.append(blocks[-1])
        else:
            blocks.reverse()
        block = blocks[-1]
        block.wait()
        _placing.is_kept = True
        try:
            yield block.view
        finally:
            _placing.is_kept = False
            block.copied = Moment(self._devices)

    def finish(self) -> None:
        """Block until devices have copied all, and let go of the memory."""
        for block in self._all:
            block.close()


def copy_in(tensor: torch.Tensor, dtype: torch.dtype, values: Array) -> None:
    """Copy saved values, an array of bits, into a tensor.  Returns at once where their memory is kept."""
    if not (values.flags.writeable and values.flags.aligned):
        values = np.array(values)
    source = torch.from_numpy(values).view(dtype)
    later = _placing.is_kept and source.is_contiguous() and tensor.is_contiguous()
    tensor.copy_(source, non_blocking=later)
