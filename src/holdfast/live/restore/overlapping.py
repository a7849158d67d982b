"""Loading into tensors whose elements share memory: an expanded one, windows that overlap.

    bias = torch.zeros(1).expand(10)      # ten elements, one number

A load that fills such a tensor element by element leaves the last element's value in all elements of its
place.  That is right only if their saved values agree.  So such a tensor is no target itself: its values
are read on the side before anything is overwritten, refused if two in one place differ, and put into the
shared memory when the load is done.  Tensors of the common kind, contiguous ones, cost one look.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from holdfast.base.errors import FormatError, LayoutError, StoreError
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.reading import read_alone
from holdfast.core.checkpoint.rows import Want
from holdfast.live.restore.targets import is_known, target_of
from holdfast.live.state.arrays import raw_array
from holdfast.live.state.named import Prepared
from holdfast.live.state.tensor_kinds import writing

MOST_COUNTED = 1 << 26
"""Elements of which the places are counted one by one, where strides alone do not tell."""


def overlaps(tensor: torch.Tensor) -> bool:
    """True if two elements share a place in memory, or may and are too many to count."""
    if tensor.is_contiguous():
        return False
    dims = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape) if n > 1)
    if not tensor.numel() or not dims:
        return False
    if dims[0][0] == 0:
        return True
    reach = 0
    for stride, size in dims:  # each dim steps over all that the smaller ones reach: as in a slice
        if stride <= reach:
            return tensor.numel() > MOST_COUNTED or _share_a_place(tensor)
        reach += stride * (size - 1)
    return False


def _share_a_place(tensor: torch.Tensor) -> bool:
    """True if two elements lie at one place; counted, for strides that interleave."""
    places = np.zeros(1, np.int64)
    for stride, size in zip(tensor.stride(), tensor.shape):
        places = (places[:, None] + np.arange(size) * stride).reshape(-1)
    return len(np.unique(places)) < len(places)


@dataclass(frozen=True)
class Aside:
    """Memory of its own for the values of a tensor that shares its memory with itself."""

    name: str
    shared: torch.Tensor
    values: torch.Tensor

    @staticmethod
    def of(name: str, shared: torch.Tensor) -> Aside:
        """An `Aside` on the CPU that is not filled yet."""
        return Aside(name, shared, torch.empty(shared.shape, dtype=shared.dtype))

    def check(self) -> None:
        """LayoutError unless values that share a place agree, bit for bit."""
        memory = torch.zeros(self._reach, dtype=self.values.dtype)
        view = raw_array(memory.as_strided(self.shared.shape, self.shared.stride()))
        values = raw_array(self.values)
        np.copyto(view, values)
        if view.tobytes() != values.tobytes():
            raise LayoutError(
                f"{self.name!r}: elements of the live tensor share memory (shape "
                f"{tuple(self.shared.shape)}, strides {self.shared.stride()}), and what was saved differs "
                "where they do",
                hint="give it memory of its own: tensor.clone(), or tensor.contiguous() after expand()",
            )

    def put(self) -> None:
        """Write the values to the shared memory.  LayoutError as `check`."""
        self.check()
        with writing(self.shared):
            start = self.shared.storage_offset()
            memory = self.shared.as_strided((self._reach,), (1,), start)
            host = memory.cpu().resolve_conj().resolve_neg().clone()
            view = host.as_strided(self.shared.shape, self.shared.stride())
            np.copyto(raw_array(view), raw_array(self.values))
            memory.copy_(host)

    @property
    def _reach(self) -> int:
        """Elements from the first to the last of the shared memory."""
        steps = zip(self.shared.shape, self.shared.stride())
        return 1 + int(sum((n - 1) * stride for n, stride in steps))


def read_overlapping(checkpoint: Checkpoint, live: Prepared) -> dict[int, Aside]:
    """An `Aside` for each part, by its id, that shares its memory with itself and is to be loaded.

    Reads what was saved of them, alone.  LayoutError if it cannot be in such memory.
    """
    asides: dict[int, Aside] = {}
    wants = []
    for name, t in live.tensors.items():
        for part in t.parts:
            if overlaps(part.local) and is_known(checkpoint, name):
                aside = asides[id(part)] = Aside.of(name, part.local)
                dtype = checkpoint.info(name).dtype
                target = target_of(aside.values, dtype, name)
                wants.append(Want(checkpoint.index(name), part.box, target))
    if wants:
        with suppress(FormatError, StoreError):  # met again, by all ranks together
            read_alone(checkpoint.images, wants)
            for aside in asides.values():
                aside.check()
    return asides
