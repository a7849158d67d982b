"""Nested tensors: the values of all rows in one buffer, and the rows' lengths.

Lengths are part of what such a tensor is: a live one keeps its own, which torch has told to graphs and
caches, and takes the values of one with the same lengths.
"""

from __future__ import annotations

import torch

from holdfast.live.state.apart import Flattened, in_words

JAGGED = ("_offsets", "_lengths")


def flatten_nested(tensor: torch.Tensor, name: str) -> Flattened | None:
    """Return what a nested tensor is made of; None for one of another layout or class."""
    kind = type(tensor)
    if tensor.layout is torch.strided and kind in (torch.Tensor, torch.nn.Parameter):
        plain = tensor.detach()
        told = {
            "sizes": plain._nested_tensor_size().tolist(),
            "strides": plain._nested_tensor_strides().tolist(),
            "offsets": plain._nested_tensor_storage_offsets().tolist(),
        }
        return Flattened("torch.nested", in_words(told, tensor), {"values": plain.values()})
    if kind.__qualname__ != "NestedTensor" or not kind.__module__.startswith("torch.nested."):
        return None
    lengths = {name: getattr(tensor, name) for name in JAGGED}
    told = {"ragged_dim": tensor._ragged_idx, **lengths}
    inner = {"values": tensor._values.detach()}
    inner |= {name.strip("_"): value for name, value in lengths.items() if value is not None}
    return Flattened("torch.nested, jagged", in_words(told, tensor), inner)
