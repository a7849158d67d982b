"""An image that is assembled while it is written: each block from the tensors that lie in it.

There is no copy of the state in memory, only one block for each writing thread.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
import torch

from holdfast.base.threads import ThreadPages
from holdfast.core.format.image import Image
from holdfast.live.state.arrays import array_of
from holdfast.live.state.devices import devices_of, wait_for, wait_for_writers


class Gathered:
    """The blocks of an image, for `write_blocks`.  `tensors`: one for each piece, in the order of
    pieces."""

    def __init__(self, image: Image, tensors: Sequence[torch.Tensor]) -> None:
        self._image = image
        self._flat = [_flat(t) for t in tensors]
        self._starts = (image.data_start + image.pieces.offset).tolist()
        self._stops = [a + n for a, n in zip(self._starts, image.pieces.bytes.tolist())]
        self._scratch = ThreadPages()
        wait_for(devices_of(self._flat))  # other threads have other streams
        wait_for_writers(self._flat)

    def block(self, start: int, stop: int) -> memoryview:
        """Gather bytes `start..stop`.  The memory belongs to this thread, and is reused by its next
        call."""
        view = self._scratch.get(stop - start)
        head = self._image.header[start:stop]
        view[: len(head)] = head
        first, last = bisect_right(self._stops, start), bisect_left(self._starts, stop)
        for piece in range(first, last):
            a, b = max(self._starts[piece], start), min(self._stops[piece], stop)
            origin = self._starts[piece]
            _copy(view[a - start : b - start], self._flat[piece], a - origin, b - origin)
        return view

    def last(self, start: int, table: bytes) -> memoryview:
        """Gather the bytes from `start` to the table again, and append the table."""
        size = self._image.table_start - start
        view = memoryview(mmap.mmap(-1, -(-(size + len(table)) // mmap.PAGESIZE) * mmap.PAGESIZE))
        if size:  # none, if the image ends with a block
            view[:size] = self.block(start, self._image.table_start)
        view[size : size + len(table)] = table
        return view[: size + len(table)]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.is_cpu:
        return torch.from_numpy(array_of(plain).reshape(-1).view(np.uint8))
    return plain.reshape(-1).view(torch.uint8)


def _copy(into: memoryview, flat: torch.Tensor, start: int, stop: int) -> None:
    if flat.is_cpu:
        np.copyto(np.frombuffer(into, np.uint8), flat.numpy()[start:stop])
    else:
        torch.frombuffer(into, dtype=torch.uint8).copy_(flat[start:stop])
