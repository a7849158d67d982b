"""Torch's own quantised tensors (`qint8` and its kin) as what they consist of, and back.

Such a tensor is integers and the line that they stand for: value = scale * (integer - zero point), with one
scale for all of them or one for each index of `axis`.
"""

from __future__ import annotations

from typing import Any

import torch

from holdfast.errors import FormatError
from holdfast.format.extras import Unsaved

_PER_TENSOR, _PER_CHANNEL = "per_tensor_affine", "per_channel_affine"


def quantised_parts(tensor: torch.Tensor, path: str) -> dict[str, Any]:
    """Integers and scales of a quantised tensor, as plain values and plain tensors.

    Unsaved for other kinds of quantisation; `path` is where it lies.
    """
    scheme = str(tensor.qscheme()).removeprefix("torch.")
    dtype = str(tensor.dtype).removeprefix("torch.")
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
        return torch._make_per_channel_quantized_tensor(values, scale, zero, parts["axis"])
    return torch._make_per_tensor_quantized_tensor(values, scale, zero)
