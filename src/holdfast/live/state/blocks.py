"""Placement of the inner tensors of a sharded quantised tensor in the whole.

torchao's optimizer states are quantised in blocks of k elements in a row: a shard of shape (32, 128), with
k = 256, has codes of its own shape and one scale for each two rows.

      whole (64, 128)           scales (32, 1)
    +-----------------+           +-----+
    | rank 0   32 x 128 | ------> | 16  |      each block is a box of 2 x 128 elements
    | rank 1   32 x 128 | ------> | 16  |      of the whole tensor, on any number of ranks
    +-----------------+           +-----+

So where blocks are boxes, the scales are a tensor of their own, with the shape of the whole divided by the
box, and are cut and put together like any tensor.  Another layout can take them, bit for bit, if its blocks
are the same boxes; a cut along the columns makes other boxes (4 x 64), and is refused.  Blocks that are no
boxes (k = 256 in rows of 96) are counted along the whole tensor's elements, which takes cuts along dim 0.

The inner tensors of an unknown subclass mean something only shard by shard: they are stacked, one shard
behind the other, and go back onto the same layout alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from holdfast.core.layout import Box, whole
from holdfast.live.state.placed import AxisCut, cut_by, shard_order

TORCHAO_STATES = ("OptimState8bit", "OptimState4bit", "OptimStateFp8")
"""Classes of torchao whose values are quantised in blocks of elements in a row."""
QMAP = "qmap"
"""Name of their tensor with the meaning of each code, the same on all ranks."""
TORCHAO_WEIGHTS = ("Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor")
"""Classes of torchao whose scales have as many dims as the values."""


NOWHERE = Box((), ())


@dataclass(frozen=True)
class Outer:
    """The place of a tensor that is made of others."""

    shape: tuple[int, ...]
    box: Box
    cuts: tuple[AxisCut, ...] | None
    tensor: Any
    """The DTensor; None if the tensor is whole."""
    local: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Outer:
        return Outer(shape, whole(shape), (), None, shape)

    @property
    def is_whole(self) -> bool:
        """True if each rank has the whole tensor."""
        return self.tensor is None or all(p.is_replicate() for p in self.tensor.placements)

    def on(self, shape: tuple[int, ...], box: Box) -> tuple[AxisCut, ...] | None:
        """The cuts by this tensor's placements that make a box of another shape; None if none do."""
        if self.is_whole:
            return ()
        mesh = self.tensor.device_mesh
        at, placements = tuple(mesh.get_coordinate()), tuple(self.tensor.placements)
        found, cuts = cut_by(mesh, at, placements, shape)
        return cuts if found == box else None


@dataclass(frozen=True)
class BlockPlacement:
    """The placement of an inner tensor: after a view, it is a box of a tensor of `shape`."""

    words: str
    shape: tuple[int, ...] | None = None
    """None for a whole tensor."""
    box: Box = NOWHERE
    cuts: tuple[AxisCut, ...] | None = ()


def block_placement(kind: str, attribute: str, inner: torch.Tensor, outer: Outer) -> BlockPlacement:
    """The placement of an inner tensor of a tensor of class `kind`."""
    module, _, name = kind.rpartition(".")
    shape = tuple(inner.shape)
    if module.startswith("torchao."):
        lie = None
        if name in TORCHAO_STATES and attribute == QMAP:
            return BlockPlacement("")
        if name in (*TORCHAO_STATES, *TORCHAO_WEIGHTS) and shape == outer.local:
            return BlockPlacement("alike", outer.shape, outer.box, outer.cuts)
        if name in TORCHAO_STATES and inner.is_contiguous():
            lie = _in_row(shape, outer)
        elif name in TORCHAO_WEIGHTS and len(shape) == len(outer.local) and inner.is_contiguous():
            lie = _in_boxes(tuple(n // max(1, m) for n, m in zip(outer.local, shape)), outer)
        if lie is not None and lie.box.size == inner.numel():
            return lie
    return BlockPlacement("") if outer.is_whole else _by_shard(shape, outer)


def block_shape(shape: tuple[int, ...], size: int) -> tuple[int, ...] | None:
    """Shape of blocks of `size` consecutive elements of a tensor; None if the blocks are no boxes.

    >>> block_shape((64, 128), 256), block_shape((4, 512), 256), block_shape((128, 96), 256)
    ((2, 128), (1, 256), None)
    """
    block: list[int] = []
    for n in reversed(shape):
        if max(n, size) % min(n, size):
            return None
        block.append(min(n, size))
        size //= block[-1]
    return tuple(reversed(block)) if size == 1 else None


def _in_row(shape: tuple[int, ...], outer: Outer) -> BlockPlacement | None:
    """The placement of scales with one element for each block of consecutive elements."""
    elements, number = prod(outer.local), prod(shape)
    if len(shape) != 1 or not number or elements % number:
        return None
    size = elements // number
    block = block_shape(outer.local, size)
    if block is not None:
        return _in_boxes(block, outer)
    start = sum(a * prod(outer.shape[d + 1 :]) for d, a in enumerate(outer.box.start))
    if outer.box.shape[1:] != outer.shape[1:] or start % size or prod(outer.shape) % size:
        return None
    box = Box((start // size,), (start // size + number,))
    flat = (prod(outer.shape) // size,)
    return BlockPlacement(
        f"in blocks of {size} elements in a row", flat, box, () if outer.is_whole else None
    )


def _in_boxes(block: tuple[int, ...], outer: Outer) -> BlockPlacement | None:
    """The placement of scales with one element for each box of the shape `block`."""
    edges = zip(block, outer.shape, outer.box.start, outer.box.stop)
    if any(not b or n % b or i % b or j % b for b, n, i, j in edges):
        return None
    shape = tuple(n // b for n, b in zip(outer.shape, block))
    start = tuple(i // b for i, b in zip(outer.box.start, block))
    stop = tuple(j // b for j, b in zip(outer.box.stop, block))
    box = Box(start, stop)
    words = f"in blocks of {' x '.join(map(str, block))} elements"
    return BlockPlacement(words, shape, box, outer.on(shape, box))


def _by_shard(shape: tuple[int, ...], outer: Outer) -> BlockPlacement:
    """The placement of a shard's own tensor in the stack over all shards."""
    mesh, placements = outer.tensor.device_mesh, outer.tensor.placements
    order = shard_order(placements, tuple(mesh.shape))
    at, number, index = mesh.get_coordinate(), 1, 0
    for mesh_dim, _ in order:
        number *= mesh.size(mesh_dim)
        index = index * mesh.size(mesh_dim) + at[mesh_dim]
    cuts = [f"dim {dim} over {mesh.size(m)}" for m, dim in order]
    box = Box((index, *(0 for _ in shape)), (index + 1, *shape))
    return BlockPlacement(f"by shard of {', '.join(cuts)}", (number, *shape), box, None)
