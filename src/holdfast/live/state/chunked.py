"""Tensors that list this rank's parts themselves: cut unevenly, by hand, or into tables.

    protocol                                                   who has it
    __create_chunk_list__(), __get_tensor_shard__(index)       what torch's DCP calls, too: ragged shards,
                                                               torch's LocalShardsWrapper
    local_shards(), metadata()                                 torch's ShardedTensor (TorchRec)
    global_shape, global_offsets, local_offsets, local_sizes   plain tensors with these attributes
                                                               (torch's CheckpointableTensor, from 2.15 on)

Each part is a box of the whole tensor, and nothing else has to be known of the class: another layout, also
a whole tensor or a DTensor, takes the boxes.  The plan of a save checks that the parts of all ranks make up
the whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.base.errors import LayoutError
from holdfast.core.layout import Box
from holdfast.live.ragged import is_ragged, parts_of
from holdfast.live.state.placed import Placed, memory_of
from holdfast.live.state.tensor_kinds import check_kind


def chunks_of(tensor: torch.Tensor, name: str) -> tuple[Placed, ...] | None:
    """This rank's parts of a tensor that lists them; None for another tensor."""
    if _is_sharded(tensor):
        shape = tuple(tensor.metadata().size)
        pairs = [
            (shard.tensor, tuple(shard.metadata.shard_offsets)) for shard in tensor.local_shards()
        ]
    elif is_ragged(tensor):
        shape, pairs = parts_of(tensor, name)
    else:
        teller = _teller(tensor)
        if teller is None:
            return None
        shape, pairs = tuple(tensor.shape), _shards(teller, name)
    return tuple(_placed(part, at, shape, name) for part, at in pairs)


def _is_sharded(tensor: Any) -> bool:
    return any(
        base.__name__ == "ShardedTensor" and base.__module__.startswith("torch.distributed.")
        for base in type(tensor).__mro__
    )


def _teller(tensor: torch.Tensor) -> Any:
    """The tensor, or its local one inside a DTensor, that lists parts; None if neither does."""
    for one in (tensor, memory_of(tensor)):
        told = getattr(type(one), "__create_chunk_list__", None)
        if told is not None and told is not getattr(DTensor, "__create_chunk_list__", None):
            return one
    return None


def _shards(teller: Any, name: str) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    """This rank's parts with their first indices.  LayoutError if they are not given out."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    found = []
    for number, chunk in enumerate(teller.__create_chunk_list__()):
        index = MetadataIndex(name, torch.Size(chunk.offsets), number)
        part = teller.__get_tensor_shard__(index)
        if tuple(part.shape) != tuple(chunk.sizes):
            raise LayoutError(
                f"{name!r}: __create_chunk_list__() of {type(teller).__qualname__} tells of a part of "
                f"{tuple(chunk.sizes)}, and __get_tensor_shard__() gives one of {tuple(part.shape)}"
            )
        found.append((part, tuple(chunk.offsets)))
    return found


def _placed(part: torch.Tensor, at: tuple[int, ...], shape: tuple[int, ...], name: str) -> Placed:
    check_kind(part, name)
    box = Box(at, tuple(i + n for i, n in zip(at, part.shape)))
    if any(j > n for j, n in zip(box.stop, shape)) or len(at) != len(shape):
        raise LayoutError(
            f"{name!r}: a part at {at} of shape {tuple(part.shape)} is not inside {shape}"
        )
    return Placed(part.detach(), shape, box, None)
