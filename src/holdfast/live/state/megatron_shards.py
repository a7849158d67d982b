"""Megatron-Core's models: what `sharded_state_dict` tells of each weight.

A model of Megatron-Core says of every weight which part of which whole tensor this rank holds.  That gives
its name and boxes: layers and experts by their numbers in the whole model, the halves of a gated layer as
two boxes, a tied embedding of the last stage under the first one's name.

    >>> lower_half = ((Box((0, 0), (4, 4)), (4, 0)),)
    >>> shard = TensorShard("w", (8, 4), (4, 4), lower_half)
    >>> [str(box) for box, _ in shard.parts(torch.zeros(4, 4))]
    ['4:8,0:4']

With `holdfast.live.state.megatron` the only module that knows Megatron's attributes (0.16); it imports
nothing of Megatron, and is loaded once Megatron is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from holdfast.base.errors import LayoutError, UsageError
from holdfast.core.layout import Box, flat_range, whole
from holdfast.formats.read.megatron.tensors import template, unfused
from holdfast.live.state.module_wrappers import parts
from holdfast.live.state.placed import box_in

BoxValues = tuple[Box, torch.Tensor]
"""A box of the whole tensor, and this rank's values there."""

BY_LAYER = {"non_homogeneous_layers": True}
"""Asks for keys with the numbers of layers; experts are stacked still."""


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A rank's tensor of `local` shape, as boxes of a whole tensor: (box of the local, its start)."""

    name: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    pieces: tuple[tuple[Box, tuple[int, ...]], ...]
    padded: bool = False
    """True if dim 0 of the whole tensor is padded (a vocabulary); by how much is a matter of layout."""
    stage_copy: bool = False
    """True if the tensor is another pipeline stage's weight (a tied embedding)."""
    rank_copy: bool = False
    """True if another tensor-parallel rank has the same part."""

    def parts(self, like: torch.Tensor) -> Iterator[BoxValues]:
        """Parts of the whole tensor that `like`, which is laid out as the rank's tensor, has."""
        yield from self._within(whole(self.local), like.view(self.local))

    def flat_parts(self, flat: torch.Tensor, start: int, stop: int) -> Iterator[BoxValues]:
        """Parts of the whole tensor in `flat`, elements `start..stop` of the rank's tensor."""
        at = 0
        for box in flat_range(self.local, start, stop):
            yield from self._within(box, flat.narrow(0, at, box.size).view(box.shape))
            at += box.size

    def _within(self, box: Box, values: torch.Tensor) -> Iterator[BoxValues]:
        for piece, start in self.pieces:
            common = piece & box
            if common is None:
                continue
            low = tuple(s + a - o for s, a, o in zip(start, common.start, piece.start))
            there = Box(low, tuple(a + n for a, n in zip(low, common.shape)))
            yield there, values[common.within(box.start)] if self.local else values


# -- recognising ------------------------------------------------------------------------------------


def is_megatrons(value: Any) -> bool:
    """True if the class of a value is Megatron's, or a subclass of one."""
    return any(c.__module__.split(".", 1)[0] == "megatron" for c in type(value).__mro__)


def is_wrapped(module: nn.Module) -> bool:
    """True if it is a wrapper of Megatron's around a model (data parallelism, half precision)."""
    inside = getattr(module, "module", None)
    return isinstance(inside, nn.Module) and is_megatrons(module)


def is_model(module: nn.Module) -> bool:
    """True if it is a model of Megatron-Core, unwrapped."""
    return is_megatrons(module) and callable(getattr(module, "sharded_state_dict", None))


# -- models ---------------------------------------------------------------------------------------


def shards_of(model: nn.Module) -> dict[int, TensorShard]:
    """The shard that tells how a parameter or buffer lies in the whole model, by its id."""
    return _shards_in(model.sharded_state_dict(metadata=dict(BY_LAYER)))


def _shards_in(tree: Any) -> dict[int, TensorShard]:
    found: dict[int, TensorShard] = {}
    for entry in _leaves(tree):
        if _is_tensor(entry):
            build = getattr(entry, "build", None)
            found[id(entry.data)] = _shard(entry, [entry] if build is None else _leaves(build()))
    return found


def names_of(model: nn.Module) -> dict[str, list[str]]:
    """Names in the whole model of parameters, buffers and modules' extra states, by their paths here."""
    tree = model.sharded_state_dict(metadata=dict(BY_LAYER))
    shards = _shards_in(tree)
    found: dict[str, list[str]] = {}
    for prefix, part in parts(model):
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if id(tensor) in shards:
                whole_name = shards[id(tensor)].name
                found[prefix + name] = [whole_name, *unfused([whole_name])]
    for name, entry in tree.items():
        if not _is_tensor(entry):
            whole_name, axes = template(entry.key)
            found[name] = [whole_name.format(*entry.global_offset[:axes])]
    return found


def _is_tensor(entry: Any) -> bool:
    """True if `entry` is a weight or a buffer, and no extra state, which may be a tensor too."""
    return hasattr(entry, "build") or hasattr(entry, "local_shape")


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in _leaves(value)]
    if isinstance(tree, (list, tuple)):
        return [leaf for value in tree for leaf in _leaves(value)]
    return [tree]


def _shard(entry: Any, tensors: list[Any]) -> TensorShard:
    """The shard of one ShardedTensor, or of those that a factory makes of a weight."""
    first, data = tensors[0], entry.data
    name, axes = template(first.key)
    at = first.global_offset[:axes]
    shape = tuple(first.global_shape[axes:])
    alike = all((t.key, t.global_shape, t.global_offset[:axes]) == (first.key, first.global_shape, at)
                for t in tensors)  # fmt: skip
    if not alike or axes != first.prepend_axis_num or len(shape) != data.ndim:
        raise UsageError(
            f"{entry.key!r}: a weight that Megatron stores in several tensors cannot be live state "
            "yet (Mamba's projections, grouped experts)"
        )
    pieces = tuple((box_in(t.data, data), tuple(t.global_offset[axes:])) for t in tensors)
    if sum(box.size for box, _ in pieces) != data.numel():
        raise LayoutError(f"{entry.key!r}: its parts do not make it up")
    stage, rank = (0, 0) if isinstance(first.replica_id, int) else first.replica_id[:2]
    padded = bool(first.allow_shape_mismatch)
    return TensorShard(
        name.format(*at), shape, tuple(data.shape), pieces, padded, bool(stage), bool(rank)
    )
