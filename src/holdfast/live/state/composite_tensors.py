"""Tensors that are made of several others: each of these is saved as a tensor of its own.

    kind                                     names of its parts, behind the tensor's own
    traceable subclass (quantised, jagged)   what `__tensor_flatten__` names: `.codes`, `.scale`
    sparse                                   `.indices` and `.values`, or as compressed layouts name them
    nested, strided                          `.values`
    cut by hand, sharded (`chunked`)         nothing: its parts are boxes of one tensor

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
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.base.errors import UsageError, need
from holdfast.core.codec.digest import hexdigest
from holdfast.core.format.extras import MADE_OF
from holdfast.live.ragged import is_ragged
from holdfast.live.state.blocks import Outer, block_placement
from holdfast.live.state.encoding import content_digest
from holdfast.live.state.named import NamedTensors
from holdfast.live.state.placed import Placed, dtensor_box, memory_of

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

    def lies(self) -> dict[str, str]:
        """Words for the placement of each inner tensor."""
        if self.outer is None:
            return dict.fromkeys(self.inner, "")
        return {
            n: block_placement(self.kind, n, t, self.outer).words for n, t in self.inner.items()
        }

    def said(self) -> dict[str, Any]:
        """The description that is saved beside the inner tensors."""
        return {"class": self.kind, "context": self.context, "parts": self.lies()}


def add_flattened(
    live: NamedTensors, name: str, state: str, tensor: torch.Tensor, *, steady: bool
) -> bool:
    """Add the parts of a tensor; False for an unknown kind of tensor."""
    from holdfast.live.state.chunked import chunks_of

    parts = chunks_of(tensor, name)
    if parts is not None:
        is_plain = is_ragged(tensor)  # other classes may not say how often they were written
        source = tensor if is_plain or not parts else parts[0].local
        steady = steady and (is_plain or len(parts) == 1)
        live.add_parts(name, state, parts, source, steady=steady)
        return True
    if memory_of(tensor).layout not in (torch.strided, torch.jagged):
        from holdfast.live.state.sparse import add_sparse

        return add_sparse(live, name, state, tensor)
    apart = flatten_subclass(tensor, name)
    if apart is None:
        return False
    live.extras[name + MADE_OF] = apart.said()
    names = live.apart.setdefault(name, [])
    for attribute, inner in apart.inner.items():
        full = f"{name}.{attribute}"
        add_inner(live, full, inner_state(state, attribute), inner, apart, steady=steady)
        names += live.apart.get(full, [full])
    return True


def inner_state(state: str, attribute: str) -> str:
    """The manifest's `state` of an inner tensor: its name without that of the parameter."""
    return state if state in ("param", "buffer", "tensor") else f"{state}.{attribute}"


def add_inner(
    live: NamedTensors,
    name: str,
    state: str,
    inner: torch.Tensor,
    apart: Flattened,
    *,
    steady: bool,
) -> None:
    """Add an inner tensor at its place in the whole."""
    attribute = name.rpartition(".")[2]
    if apart.outer is None:
        live.add(name, state, inner, steady=steady)
        return
    lie = block_placement(apart.kind, attribute, inner, apart.outer)
    if lie.shape is None:
        live.add(name, state, inner, steady=steady)
        return
    view = inner.detach().view(lie.box.shape)
    live.add_parts(name, state, (Placed(view, lie.shape, lie.box, lie.cuts),), inner, steady=steady)


def flatten_subclass(tensor: torch.Tensor, name: str) -> Flattened | None:
    """Flatten a tensor subclass into the tensors that it is made of; None if it cannot be flattened."""
    memory = memory_of(tensor)
    kind = type(memory)
    if any(base.__name__ in NOT_WHOLE for base in kind.__mro__):
        return None
    if memory.is_nested:
        return None if isinstance(tensor, DTensor) else flatten_nested(memory, name)
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


def flatten_nested(tensor: torch.Tensor, name: str) -> Flattened | None:
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
