"""Ragged tensors: plain ones whose attributes say which parts of a whole tensor they have.

    global_shape       shape of the whole
    global_offsets     of each part: its first index in the whole
    local_offsets      of each part: its first index in this tensor
    local_sizes        of each part: its shape

torch's DCP knows them as `CheckpointableTensor` from 2.15 on; here the attributes count, on any torch.
What is in no part is padding, which is neither saved nor written to.
"""

from __future__ import annotations

from typing import Any

import torch

from holdfast.base.errors import LayoutError
from holdfast.core.layout import Box

Index = tuple[int, ...]
_ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def is_ragged(tensor: torch.Tensor) -> bool:
    """True if a tensor has these attributes."""
    return "global_shape" in tensor.__dict__ and all(hasattr(tensor, name) for name in _ATTRIBUTES)


def shape_of(tensor: Any) -> tuple[int, ...]:
    """The shape of the whole."""
    return tuple(map(int, tensor.global_shape))


def parts_of(
    tensor: torch.Tensor, name: str
) -> tuple[tuple[int, ...], list[tuple[torch.Tensor, Index]]]:
    """The shape of the whole, and this rank's parts as views with their first indices in the whole.
    LayoutError, with the tensor's name, if its attributes contradict each other."""
    shape, (ats, starts, sizes) = shape_of(tensor), _places(tensor)
    if not len(ats) == len(starts) == len(sizes):
        raise LayoutError(
            f"{name!r}: global_offsets, local_offsets and local_sizes have {len(ats)}, {len(starts)} and "
            f"{len(sizes)} entries",
            hint="each needs one entry for each part",
        )
    have = tuple(tensor.shape)
    for at, start, size in zip(ats, starts, sizes):
        if not (_is_inside(at, size, shape) and _is_inside(start, size, have)):
            raise LayoutError(
                f"{name!r}: a part of size {size} is not inside: it is at {at} of the whole {shape}, "
                f"and at {start} of this rank's tensor {have}"
            )
    filled = [place for place in zip(ats, sizes) if 0 not in place[1]]
    if len({*filled}) < len(filled):
        raise LayoutError(f"{name!r}: this rank's tensor has one part of the whole twice")
    values = tensor.detach()
    return shape, [(_slice(values, *place), at) for at, *place in zip(ats, starts, sizes)]


def cut(tensor: torch.Tensor, value: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """The parts of a value that lies as a ragged tensor does: boxes of the whole, and views."""
    found = []
    for at, start, size in zip(*_places(tensor)):
        box = Box(at, tuple(a + n for a, n in zip(at, size)))
        found.append((box, _slice(value, start, size)))
    return found


def _places(tensor: Any) -> tuple[list[Index], list[Index], list[Index]]:
    first, second, third = (
        [tuple(map(int, one)) for one in getattr(tensor, name)] for name in _ATTRIBUTES[1:]
    )
    return first, second, third


def _is_inside(start: Index, size: Index, shape: Index) -> bool:
    return len(start) == len(size) == len(shape) and all(
        a >= 0 and n >= 0 and a + n <= most for a, n, most in zip(start, size, shape)
    )


def _slice(value: torch.Tensor, start: Index, size: Index) -> torch.Tensor:
    return value[tuple(slice(a, a + n) for a, n in zip(start, size))] if start else value
