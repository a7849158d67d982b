"""Page-locked memory for blocks on their way to a device: two blocks for each thread that reads.

    thread    read, verify A | give copies of A | read, verify B | give copies of B | wait for A; read ...
    device                   |       A ─────────────►            |       B ───────────►

So a device copies straight out of a block while the thread reads the next.  A block is used again, or
freed, when the device has made its copies.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from holdfast.core.checkpoint.rows import Array
from holdfast.live.state.devices import LockedPages, Moment, lock_pages


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
