"""Memory that a training process fills with records and its writer empties: slots of one size."""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from io import FileIO
from typing import TYPE_CHECKING

from holdfast.base.memory_address import memory_address

if TYPE_CHECKING:
    from holdfast.live.state.devices import LockedPages

MADV_POPULATE_WRITE = 23
POPULATED_BYTES = 4 << 20
"""Bytes to make at a time: the training must not wait long for the kernel."""


class Ring:
    """`slots` times `slot_bytes` of anonymous memory, which is gone when both processes are."""

    def __init__(self, slots: int, slot_bytes: int, fd: int | None = None) -> None:
        """`fd`: the descriptor of the other process's memory; None to make new memory."""
        self.slots = slots
        self.slot_bytes = slot_bytes
        size = slots * slot_bytes
        if fd is None:
            fd = os.memfd_create("holdfast-log")
            try:
                os.posix_fallocate(fd, 0, size)  # no later write can fail
            except BaseException:
                os.close(fd)
                raise
        self._file = FileIO(fd, "r+")
        """Closed with this object, even if `close` is interrupted, as by the loss of another rank."""
        self._map = mmap.mmap(fd, size)
        self.view = memoryview(self._map)
        self.locked: LockedPages | None = None
        """Its pages, if they are locked for a device."""

    @property
    def fd(self) -> int:
        """The descriptor, which can be sent to another process."""
        return self._file.fileno()

    def populate(self) -> None:
        """Have the kernel make all pages now.  If it makes them one by one, at the first writes, that takes
        ten times as long as the copy itself.

        Blocks, on a thread beside the training, which may use the ring meanwhile.  Does nothing before
        Linux 5.14.
        """
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        with suppress(ValueError, BufferError):  # closed meanwhile
            start = memory_address(self._map)
            for at in range(0, len(self._map), POPULATED_BYTES):
                size = min(POPULATED_BYTES, len(self._map) - at)
                where = ctypes.c_void_p(start + at)
                if madvise(where, ctypes.c_size_t(size), MADV_POPULATE_WRITE):
                    return

    def slot(self, number: int) -> memoryview:
        return self.view[number * self.slot_bytes : (number + 1) * self.slot_bytes]

    def close(self) -> None:
        """Give the memory up; memory that still has views goes with the last of them."""
        self._file.close()
        if self.locked is not None:
            self.locked.undo()
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            pass
