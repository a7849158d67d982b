"""Tensors that are made of several others: each of these is saved as a tensor of its own.

    kind                                     names of its parts, behind the tensor's own
    traceable subclass (quantised, jagged)   what `__tensor_flatten__` names: `.codes`, `.scale`
    sparse                                   `.indices` and `.values`, or as compressed layouts name them
    nested, strided                          `.values`
    cut by hand, sharded (`chunks_of`)       nothing: its parts are boxes of one tensor

Inner tensors may be made of others again, and a DTensor may be around or inside.  Beside them an extra
(`MADE_OF`) describes the tensor: its class, its context from `__tensor_flatten__`, and the placement of
each inner tensor in the whole (`blocks`).  The description is text, which a restore compares with the live
tensor's; no tensor is made from it.  Values are filled in place, and a tensor whose description differs is
refused by name.

A subclass that cannot be flattened is none of these: `tensor_kinds` refuses it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.base.errors import FormatError, LayoutError, UsageError, need
from holdfast.core.codec.digest import hexdigest
from holdfast.core.format.extras import MADE_OF
from holdfast.core.layout import Box
from holdfast.live.ragged import is_ragged, parts_of
from holdfast.live.state.blocks import BlockPlacement, Outer, block_placement
from holdfast.live.state.encoding import content_digest
from holdfast.live.state.named import NamedTensors
from holdfast.live.state.placed import Placed, dtensor_box, memory_of
from holdfast.live.state.tensor_kinds import PLAIN_TENSORS, check_kind, writing

need("torch", torch.Tensor, "_indices", "_values", "_coalesced_")

NOT_WHOLE = ("AsyncCollectiveTensor", "FakeTensor", "FunctionalTensor", "MaskedTensor")
"""Classes with `__tensor_flatten__`, or the look of it, whose values are elsewhere or still to come."""
UNSAID = ("device", "requires_grad")
"""Fields of a context that do not matter: the live tensor keeps its own."""
MAX_CONTEXT = 4000
MAX_WORD_DEPTH = 8


@dataclass(frozen=True)
class Flattened:
    """A tensor as the tensors that it is made of."""

    kind: str
    context: str
    """The rest of the tensor besides its inner tensors, as text."""
    inner: dict[str, torch.Tensor]
    outer: Outer | None = None
    """The place of the outer tensor; None if inner tensors are whole, or DTensors with places of their
    own."""

    def lie(self, attribute: str) -> BlockPlacement:
        """The placement of an inner tensor."""
        if self.outer is None:
            return BlockPlacement("")
        return block_placement(self.kind, attribute, self.inner[attribute], self.outer)

    def said(self) -> dict[str, Any]:
        """The description that is saved beside the inner tensors."""
        parts = {attribute: self.lie(attribute).words for attribute in self.inner}
        return {"class": self.kind, "context": self.context, "parts": parts}


def add_flattened(
    live: NamedTensors, name: str, state: str, tensor: torch.Tensor, *, steady: bool
) -> bool:
    """Add the parts of a tensor; False for an unknown kind of tensor."""
    parts = chunks_of(tensor, name)
    if parts is not None:
        is_plain = is_ragged(tensor)  # other classes may not say how often they were written
        source = tensor if is_plain or not parts else parts[0].local
        steady = steady and (is_plain or len(parts) == 1)
        live.add_parts(name, state, parts, source, steady=steady)
        return True
    apart = flatten(tensor, name)
    if apart is None:
        return False
    inner = apart.inner
    if tensor.layout in SPARSE:
        inner, steady = live.memory_of_parts(name, inner, partial(_put_sparse, name, tensor)), False
    live.extras[name + MADE_OF] = apart.said()
    live.apart[name] = names = list[str]()
    for attribute, one in inner.items():
        full, lie = f"{name}.{attribute}", apart.lie(attribute)
        # the manifest's `state` of an inner tensor is its name without that of the parameter
        is_models = state in ("param", "buffer", "tensor")
        own_state = state if is_models else f"{state}.{attribute}"
        if lie.shape is None:
            live.add(full, own_state, one, steady=steady)
        else:
            placed = Placed(one.detach().view(lie.box.shape), lie.shape, lie.box, lie.cuts)
            live.add_parts(full, own_state, (placed,), one, steady=steady)
        names += live.apart.get(full, [full])
    return True


def flatten(tensor: torch.Tensor, name: str) -> Flattened | None:
    """Flatten a tensor into the tensors that it is made of; None if it cannot be flattened."""
    memory = memory_of(tensor)
    if memory.layout not in (torch.strided, torch.jagged):
        return flatten_sparse(tensor)
    kind = type(memory)
    if any(base.__name__ in NOT_WHOLE for base in kind.__mro__):
        return None
    if memory.is_nested:
        return None if isinstance(tensor, DTensor) else flatten_nested(memory)
    if not callable(getattr(memory, "__tensor_flatten__", None)):
        return None
    attributes, context = memory.__tensor_flatten__()
    inner = {attribute: getattr(memory, attribute) for attribute in attributes}
    for attribute, value in inner.items():
        if not isinstance(value, torch.Tensor) or not attribute.isidentifier():
            raise UsageError(
                f"{name}.{attribute}: __tensor_flatten__() of a {kind.__qualname__} names something "
                "that is no tensor"
            )
    outer = None
    if not any(isinstance(value, DTensor) for value in inner.values()):
        outer = outer_of(tensor, name)
    text = in_words(context, memory)
    return Flattened(f"{kind.__module__}.{kind.__qualname__}", text, inner, outer)


def outer_of(tensor: torch.Tensor, name: str) -> Outer:
    """The place of a tensor whose memory is made of others."""
    memory = memory_of(tensor)
    if isinstance(tensor, DTensor):
        box, cuts = dtensor_box(tensor, name)
        return Outer(tuple(tensor.shape), box, cuts, tensor, tuple(memory.shape))
    return Outer.whole(tuple(memory.shape))


# -- what a tensor says of itself ------------------------------------------------------------------


def in_words(context: Any, tensor: torch.Tensor) -> str:
    """The context of a tensor (`__tensor_flatten__`) as text, equal for tensors that are alike."""
    shape = () if tensor.is_nested else tuple(tensor.shape)
    strides = () if tensor.is_nested else tuple(tensor.stride())
    text = _word(context, {shape: "shape", strides: "strides"} if shape else {}, 0)
    return text if len(text) <= MAX_CONTEXT else f"digest {hexdigest(text.encode())}"


def _word(value: Any, own: dict[Any, str], depth: int) -> str:
    if depth > MAX_WORD_DEPTH:
        return "..."
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.layout)):
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {content_digest(value)}"
    if isinstance(value, type) or callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    if isinstance(value, dict):
        return _fields(((str(k), v) for k, v in value.items()), own, depth)
    if hasattr(value, "_fields"):
        named = zip(value._fields, value)
        return type(value).__qualname__ + _fields(named, own, depth)
    if isinstance(value, (tuple, list)):
        if all(isinstance(v, int) for v in value) and tuple(value) in own:
            return own[tuple(value)]  # of this rank's part, which is another on another layout
        return f"[{', '.join(_word(v, own, depth + 1) for v in value if not _is_device(v))}]"
    if hasattr(value, "__dict__"):
        return type(value).__qualname__ + _fields(vars(value).items(), own, depth)
    return type(value).__qualname__ if " at 0x" in repr(value) else repr(value)


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device)


def _fields(pairs: Any, own: dict[Any, str], depth: int) -> str:
    def words() -> Iterator[str]:
        for key, value in sorted(pairs, key=lambda pair: str(pair[0])):
            if key not in UNSAID and not _is_device(value):
                yield f"{key}={_word(value, own, depth + 1)}"

    return f"({', '.join(words())})"


# -- nested tensors -----------------------------------------------------------------------------
# A nested tensor has the values of all rows in one buffer, and the lengths of the rows.  The lengths are
# part of what the tensor is: a live one keeps its own, which torch has told to graphs and caches, and takes
# the values of a saved one with the same lengths.


JAGGED = ("_offsets", "_lengths")


def flatten_nested(tensor: torch.Tensor) -> Flattened | None:
    """Flatten a nested tensor; None for another layout or class."""
    kind = type(tensor)
    if tensor.layout is torch.strided and kind in (torch.Tensor, torch.nn.Parameter):
        plain = tensor.detach()
        sizes, strides, offsets = need(
            "torch", plain,
            "_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets",
        )  # fmt: skip
        told = {
            "sizes": sizes().tolist(),
            "strides": strides().tolist(),
            "offsets": offsets().tolist(),
        }
        return Flattened("torch.nested", in_words(told, tensor), {"values": plain.values()})
    if kind.__qualname__ != "NestedTensor" or not kind.__module__.startswith("torch.nested."):
        return None
    lengths = dict(zip(JAGGED, need("torch", tensor, *JAGGED)))
    ragged_dim, values = need("torch", tensor, "_ragged_idx", "_values")
    told = {"ragged_dim": ragged_dim, **lengths}
    inner = {"values": values.detach()}
    inner |= {name.strip("_"): value for name, value in lengths.items() if value is not None}
    return Flattened("torch.nested, jagged", in_words(told, tensor), inner)


# -- sparse tensors -----------------------------------------------------------------------------
# Indices and values are saved as two or three dense tensors.  The number of specified elements changes in a
# run, so sparse tensors are not filled in place: indices and values are read into new memory, put together,
# checked by torch, and copied into the live tensor, which takes their number.  Shape, layout and number of
# sparse dims are the live tensor's.


COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
"""Methods that give the indices of a compressed layout, outer ones first."""
SPARSE = (torch.sparse_coo, *COMPRESSED)


def flatten_sparse(tensor: torch.Tensor) -> Flattened | None:
    """Flatten a sparse tensor into parts that share its memory; None for another layout, or a DTensor's."""
    if type(tensor) not in PLAIN_TENSORS or tensor.layout not in SPARSE:
        return None
    plain, context = tensor.detach(), f"{tuple(tensor.shape)}, {tensor.dtype}"
    if plain.layout is torch.sparse_coo:
        inner = {"indices": plain._indices(), "values": plain._values()}
        context += f", {tensor.sparse_dim()} sparse dims"
    else:
        inner = {name: getattr(plain, name)() for name in COMPRESSED[plain.layout]}
        inner["values"] = plain.values()
    return Flattened(str(tensor.layout), context, inner)


def _put_sparse(name: str, live: torch.Tensor, inner: dict[str, torch.Tensor]) -> None:
    """Put what was read into a live tensor.  FormatError for indices that are none."""
    *indices, values = (part.to(live.device) for part in inner.values())
    try:
        if live.layout is torch.sparse_coo:
            made = torch.sparse_coo_tensor(*indices, values, live.shape, check_invariants=True)
            made = made._coalesced_(_is_in_order(indices[0]))
        else:
            made = torch.sparse_compressed_tensor(
                *indices, values, live.shape, layout=live.layout, check_invariants=True
            )
    except RuntimeError as error:
        raise FormatError(f"{name!r}: indices of a sparse tensor that are none: {error}") from None
    with writing(live):
        if live.layout is not torch.sparse_coo:
            live.resize_as_sparse_(made)
        live.copy_(made)


def _is_in_order(indices: torch.Tensor) -> bool:
    """True if each index comes once, in row-major order, as torch keeps a coalesced tensor's."""
    if indices.shape[1] < 2:
        return True
    steps = indices[:, 1:] - indices[:, :-1]
    # the first dim that differs, and those alike
    is_first = (steps != 0).to(torch.int8).cumsum(0).eq(1)
    first = torch.where(is_first & (steps != 0), steps, 0).sum(0)
    return bool((first > 0).all())


# -- tensors that list this rank's parts themselves: cut unevenly, by hand, or into tables ------------
#
#    protocol                                                   who has it
#    __create_chunk_list__(), __get_tensor_shard__(index)       what torch's DCP calls, too: ragged shards,
#                                                               torch's LocalShardsWrapper
#    local_shards(), metadata()                                 torch's ShardedTensor (TorchRec)
#    global_shape, global_offsets, local_offsets, local_sizes   plain tensors with these attributes
#                                                               (torch's CheckpointableTensor, from 2.15 on)
#
# Each part is a box of the whole tensor, and nothing else has to be known of the class: another layout,
# also a whole tensor or a DTensor, takes the boxes.  The plan of a save checks that the parts of all ranks
# make up the whole.


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
