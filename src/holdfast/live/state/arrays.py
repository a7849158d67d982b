"""Tensors on the host as numpy arrays, which share their memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_NATIVE = {
    torch.bool: np.dtype(np.bool_),
    **dict.fromkeys((torch.int8, torch.uint8), np.dtype(np.uint8)),
    **dict.fromkeys((torch.float16, torch.int16), np.dtype(np.int16)),
    **dict.fromkeys((torch.float32, torch.int32), np.dtype(np.int32)),
    **dict.fromkeys((torch.float64, torch.int64, torch.complex64), np.dtype(np.int64)),
    torch.complex128: np.dtype(np.complex128),
}
"""Dtypes that numpy has, with the dtypes as which their elements are copied."""


def raw_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A CPU tensor's elements as a numpy array of the same shape and element size; shares memory."""
    array = array_of(tensor)
    native = _NATIVE.get(tensor.dtype)
    return array if native is None else array.view(native)


def array_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A CPU tensor as a numpy array of its own dtype, or of an integer of its size where numpy lacks it."""
    plain = tensor.detach() if tensor.requires_grad else tensor
    if plain.is_conj():
        plain = plain.resolve_conj()
    if plain.is_neg():
        plain = plain.resolve_neg()
    if plain.dtype in _NATIVE:  # numpy makes a view in a fifth of the time
        return plain.numpy()
    return plain.view(_RAW[plain.element_size()]).numpy()
