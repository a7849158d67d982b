"""Extras: values that are no tensors of a checkpoint, encoded, with small tensors inside."""

from __future__ import annotations

import base64
from operator import itemgetter
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from holdfast.base.errors import UsageError
from holdfast.core.codec.digest import hexdigest
from holdfast.core.format import extras
from holdfast.core.format.unsaved import Unsaved
from holdfast.live.ragged import is_ragged
from holdfast.live.state.devices import wait_for_writers
from holdfast.live.state.loaded import loaded_states
from holdfast.live.state.named import Collected
from holdfast.live.state.own_errors import naming
from holdfast.live.state.placed import dtype_name, memory_of, torch_dtype
from holdfast.live.state.recognising import is_loader, is_object
from holdfast.live.state.tensor_kinds import check_kind

RESIZE_RULES = ("same", "rank0", "redistribute", "fresh")
"""Rules for extras when the number of ranks changes, as a user may give them."""


PER_RANK = ("redistribute", "fresh", "ask")
"""Rules of extras that each rank saves for itself."""


def encode_extra(
    live: Collected, key: str, value: Any, *, inline: bool, rule: str | None = None, depth: int = 0
) -> Any:
    """Encode a value; tensors inside become tensors of the checkpoint unless small and `inline`.

    `rule`: of the extra that has the value, if its name is not `key`.  `depth`: number of objects around.
    """
    if depth > extras.MAX_EXTRAS_DEPTH:
        raise UsageError(
            f"{key[:80]}: objects whose state_dict() has objects, deeper than {extras.MAX_EXTRAS_DEPTH}",
            hint="does a state_dict() return its object itself?",
        )
    each_rank = (rule or live.rules.get(key)) in PER_RANK
    objects: list[tuple[str, Any, dict[str, Any]]] = []
    """(path, object, place for its state): asked for their states in one order on all ranks."""

    def on_other(leaf: Any, path: str) -> Any:
        name = f"{key}.{path}" if path else key
        if isinstance(leaf, torch.dtype):
            return {"$dtype": dtype_name(leaf)}
        if inline and isinstance(leaf, torch.Tensor) and leaf.is_quantized:
            from holdfast.live.state.quantised import quantised_parts

            return {"$quantized": extras.encode(quantised_parts(leaf, path), on_other, path)}
        if isinstance(leaf, torch.Tensor) and not inline:
            return _named(live, name, leaf, path)
        if isinstance(leaf, torch.Tensor):
            _check_tensor(leaf, name)
            if is_cut(leaf):  # each rank has its part: a tensor like a module's
                live.add(name, "tensor", leaf, steady=False)
                return {"$at": name}
            small = leaf.numel() * leaf.element_size() <= live.inline_bytes
            if small or each_rank:
                return inline_tensor(leaf)
            live.contents.setdefault(key, []).append(content_digest(leaf))
            live.add(name, "tensor", leaf, steady=False)
            return {"$at": name}
        if is_object(leaf):
            objects.append((path, leaf, {"$object": None}))
            return objects[-1][-1]
        if isinstance(leaf, torch.Size):
            return {"$tuple": list(leaf)}
        raise UsageError(
            f"{name}: a {type(leaf).__module__}.{type(leaf).__qualname__} cannot be saved",
            hint="take torchdata's StatefulDataLoader, which has state_dict(): docs/how-to/loaders.md"
            if isinstance(leaf, DataLoader)
            else "give it state_dict()/load_state_dict(), hand modules and optimizers over as "
            "values of the state itself, or reduce it to numbers, strings, lists, dicts or tensors",
        )

    if isinstance(value, torch.Size):
        value = tuple(value)
    try:
        tree = extras.encode(value, on_other, utf8=True)
    except Unsaved as error:
        raise error.within(key) from None
    for path, leaf, into in sorted(objects, key=itemgetter(0)):
        name = f"{key}.{path}" if path else key
        with naming(name, leaf, "state_dict"):
            saved = loaded_states.of(leaf)
        into["$object"] = encode_extra(live, name, saved, inline=True, depth=depth + 1)
        if is_loader(leaf):
            add_order(live, name, leaf, saved, rule or live.rules.get(key))
    return tree


def add_order(live: Collected, name: str, loader: Any, saved: Any, rule: str | None) -> None:
    """Add the order of a data loader beside its state.  torch's loaders are imported for it."""
    from holdfast.live.state.data_order import add_loader_order

    add_loader_order(live, name, loader, saved, rule)


def _named(live: Collected, name: str, leaf: torch.Tensor, path: str) -> dict[str, str]:
    """Add a tensor of a user's own dict or list, and refer to it."""
    if not path:  # its name would be that of the value itself
        raise Unsaved(" key", "a tensor under an empty text cannot be saved", "name it")
    live.add(name, "tensor", leaf, steady=False)
    return {"$at": name}


def _check_tensor(tensor: torch.Tensor, name: str) -> None:
    """UsageError or LayoutError for a tensor that cannot be saved inside an object's state."""
    check_kind(memory_of(tensor), name)
    if is_ragged(tensor):
        raise UsageError(
            f"{name}: a tensor with global_offsets, a part of a whole, cannot be saved here",
            hint="keep it in a module, or as a value of the state itself",
        )


def is_cut(tensor: torch.Tensor) -> bool:
    """True if ranks hold different parts of a tensor."""
    return isinstance(tensor, DTensor) and not all(p.is_replicate() for p in tensor.placements)


def content_digest(tensor: torch.Tensor) -> str:
    """Digest of a tensor's own elements on this rank."""
    plain = _plain(memory_of(tensor)).reshape(-1)
    return hexdigest(plain.view(torch.uint8).numpy().data)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor in memory of their own, in row-major order, on the CPU."""
    wait_for_writers((tensor,))
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def inline_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """A small tensor as JSON: dtype, shape, bytes."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    plain = _plain(tensor)
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return {
        "$tensor": [dtype_name(tensor.dtype), list(tensor.shape), base64.b64encode(data).decode()]
    }


def outline_tensor(body: Any) -> torch.Tensor:
    """The inverse of `inline_tensor`, on the CPU."""
    dtype, shape, data = body
    raw = bytearray(base64.b64decode(data))
    if not raw:
        return torch.empty(shape, dtype=torch_dtype(dtype))
    return torch.frombuffer(raw, dtype=torch.uint8).view(torch_dtype(dtype)).reshape(shape)
