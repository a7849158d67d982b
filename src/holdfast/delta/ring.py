"""Memory that a training process fills with records and its writer empties: slots of one size."""

from __future__ import annotations

import mmap
import os


class Ring:
    """`slots` times `slot_bytes` of memory without a name: it is gone when both processes are."""

    def __init__(self, slots: int, slot_bytes: int, fd: int | None = None) -> None:
        """`fd`: of the other process's."""
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
        self.fd = fd
        self._map = mmap.mmap(fd, size)
        self.view = memoryview(self._map)

    def slot(self, number: int) -> memoryview:
        return self.view[number * self.slot_bytes : (number + 1) * self.slot_bytes]

    def close(self) -> None:
        """Memory that somebody still looks at goes with the last look."""
        os.close(self.fd)
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            pass
