"""Quantised tensors, of torch and of bitsandbytes, as plain tensors and values, and back.

Torch's (`qint8` and its kin) are integers and the line that they stand for: value = scale * (integer - zero
point), with one scale for all of them or one for each index of `axis`.

bitsandbytes saves its 4-bit weights by hooks, and cannot load them by hooks.  A `Linear4bit` says in its
state_dict() what its `QuantState` consists of: scales (`weight.absmax`), the scales of these
(`weight.nested_absmax`), and the rest packed into one tensor (`weight.quant_state.bitsandbytes__nf4`).  To
put it back, the library wants a `QuantState` made anew, as transformers does it.

The only module that knows attributes of bitsandbytes (0.50); it imports nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from holdfast.base.errors import FormatError, need
from holdfast.core.format.unsaved import Unsaved
from holdfast.live.state.placed import dtype_name

# -- torch's own -------------------------------------------------------------------------------------


_PER_TENSOR, _PER_CHANNEL = "per_tensor_affine", "per_channel_affine"


def quantised_parts(tensor: torch.Tensor, path: str) -> dict[str, Any]:
    """Integers and scales of a quantised tensor, as plain values and plain tensors.

    Unsaved for other kinds of quantisation; `path` is where it lies.
    """
    scheme = str(tensor.qscheme()).removeprefix("torch.")
    dtype = dtype_name(tensor.dtype)
    if dtype in ("qint8", "quint8", "qint32") and scheme == _PER_TENSOR:
        scales = {"scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
    elif dtype in ("qint8", "quint8", "qint32") and scheme == _PER_CHANNEL:
        scales = {
            "scale": tensor.q_per_channel_scales(),
            "zero_point": tensor.q_per_channel_zero_points(),
            "axis": tensor.q_per_channel_axis(),
        }
    else:
        raise Unsaved(
            path,
            f"a {dtype} tensor with {scheme} cannot be saved",
            "save what it was quantised from, and quantise that anew",
        )
    return {"values": tensor.int_repr(), **scales}


def quantised(parts: Any) -> torch.Tensor:
    """The inverse of `quantised_parts`."""
    if not isinstance(parts, dict) or not {"values", "scale", "zero_point"} <= set(parts):
        raise FormatError("malformed extras: $quantized: no values and scales")
    values, scale, zero = parts["values"], parts["scale"], parts["zero_point"]
    if "axis" in parts:
        (make,) = need("torch", torch, "_make_per_channel_quantized_tensor")
        return make(values, scale, zero, parts["axis"])
    (make,) = need("torch", torch, "_make_per_tensor_quantized_tensor")
    return make(values, scale, zero)


# -- bitsandbytes' -----------------------------------------------------------------------------------


def has_quant_states(part: nn.Module) -> bool:
    """True if a module has 4-bit weights, whose quantisation `put_quant_states` puts back."""
    return any(map(_is_packed, part._parameters.values()))


def _is_packed(p: Any) -> bool:
    made_from = getattr(type(getattr(p, "quant_state", None)), "from_dict", None)
    return type(p).__module__.startswith("bitsandbytes.") and made_from is not None


def put_quant_states(part: nn.Module, entries: Mapping[str, Any]) -> bool:
    """Give the 4-bit weights of a module the quantisation that its state_dict() had.  True if it has
    any.

    Tensors of `entries` that are on the weight's device are used as they are.
    """
    done = False
    for name, p in part._parameters.items():
        if p is None or not _is_packed(p):
            continue
        state: Any = p.quant_state
        packed = {e[len(name) + 1 :]: v for e, v in entries.items() if e.startswith(f"{name}.")}
        made = type(state).from_dict(packed, device=p.device)
        p.quant_state = made
        if getattr(part, "quant_state", None) is state:
            part.quant_state = made
        done = True
    return done
