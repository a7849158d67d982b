"""Tensors that are made of several others: each of these is saved as a tensor of its own.

    kind                                     saved under the tensor's own name and
    traceable subclass (quantised, jagged)   what `__tensor_flatten__` names: `.codes`, `.scale`
    sparse                                   `.indices` and `.values`, or as compressed layouts name them
    nested, strided                          `.values`
    cut by hand, sharded (`chunked`)         nothing: its parts are boxes of one tensor

Inner tensors may be made of others again, and a DTensor may be around or inside.  Beside them an extra
(`MADE_OF`) keeps what the tensor is besides its values: its class, what `__tensor_flatten__` says of it,
and how each inner tensor lies in the whole (`blocks`).  That is text, which a restore compares with what
the live tensor says of itself; nothing is made of it.  So the live object decides what it is, values are
filled in place, and what differs is refused by name.

A subclass that cannot be flattened is none of these: `tensor_kinds` refuses it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.base.errors import UsageError
from holdfast.core.codec.digest import hexdigest
from holdfast.core.format.extras import MADE_OF
from holdfast.live.state.blocks import Outer, block_placement
from holdfast.live.state.encoding import content_digest
from holdfast.live.state.named import NamedTensors
from holdfast.live.state.placed import Placed, dtensor_box, memory_of

NOT_WHOLE = ("AsyncCollectiveTensor", "FakeTensor", "FunctionalTensor", "MaskedTensor")
"""Classes that can be taken apart, or look so, and stand for values that are elsewhere or still to come."""
UNSAID = ("device", "requires_grad")
"""What a tensor may say of itself that does not matter: it is the live one's."""
MAX_CONTEXT = 4000
MAX_WORD_DEPTH = 8


@dataclass(frozen=True)
class Flattened:
    """The parts that a tensor is made of."""

    kind: str
    context: str
    """The rest of it besides its inner tensors, as text."""
    inner: dict[str, torch.Tensor]
    outer: Outer | None = None
    """The places of the inner tensors; None if each is a whole of its own, or tells itself."""

    def lies(self) -> dict[str, str]:
        """Say how each inner tensor lies in the whole."""
        if self.outer is None:
            return dict.fromkeys(self.inner, "")
        return {
            n: block_placement(self.kind, n, t, self.outer).words for n, t in self.inner.items()
        }

    def said(self) -> dict[str, Any]:
        """Return what is saved of it beside the inner tensors."""
        return {"class": self.kind, "context": self.context, "parts": self.lies()}


def add_flattened(
    live: NamedTensors, name: str, state: str, tensor: torch.Tensor, *, steady: bool
) -> bool:
    """Add what a tensor is made of; False if it is of no kind that is known here."""
    from holdfast.live.state.chunked import chunks_of

    parts = chunks_of(tensor, name)
    if parts is not None:
        source = (
            parts[0].local if parts else tensor
        )  # the class may not say how often it was written
        live.add_parts(name, state, parts, source, steady=steady and len(parts) == 1)
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
    """The state that an inner tensor is saved as: its name without that of the parameter, as for others."""
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
    """Add an inner tensor where it lies."""
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
    """Return what a tensor is made of; None if it cannot be taken apart."""
    memory = memory_of(tensor)
    kind = type(memory)
    if any(base.__name__ in NOT_WHOLE for base in kind.__mro__):
        return None
    if memory.is_nested:
        from holdfast.live.state.nested import flatten_nested

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
    """Return where a tensor lies whose memory is made of others."""
    memory = memory_of(tensor)
    if isinstance(tensor, DTensor):
        box, cuts = dtensor_box(tensor, name)
        return Outer(tuple(tensor.shape), box, cuts, tensor, tuple(memory.shape))
    return Outer.whole(tuple(memory.shape))


# -- what a tensor says of itself ------------------------------------------------------------------


def in_words(context: Any, tensor: torch.Tensor) -> str:
    """Return what `__tensor_flatten__` says of a tensor, as text that is equal where tensors are alike."""
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
