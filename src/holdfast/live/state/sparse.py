"""Sparse tensors: indices and values, saved as two or three dense tensors.

The number of specified elements changes in a run, so sparse tensors are not filled in place: indices and
values are read into new memory, put together, checked by torch, and copied into the live tensor, which
takes their number.  Shape, layout and number of sparse dims are the live tensor's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.base.errors import FormatError, need
from holdfast.core.format.extras import MADE_OF
from holdfast.live.state.named import NamedTensors
from holdfast.live.state.tensor_kinds import writing

need("torch", torch.Tensor, "_indices", "_values", "_coalesced_")

COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
"""Methods that give the indices of a compressed layout, outer ones first."""


def add_sparse(live: NamedTensors, name: str, state: str, tensor: torch.Tensor) -> bool:
    """Add indices and values of a sparse tensor; False for a layout that is not known, or a DTensor's."""
    if isinstance(tensor, DTensor) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if tensor.layout not in (torch.sparse_coo, *COMPRESSED):
        return False
    from holdfast.live.state.composite_tensors import inner_state

    inner = live.memory_of_parts(name, dense_parts(tensor), partial(_put, name, tensor))
    live.extras[name + MADE_OF] = said_of(tensor)
    live.apart[name] = [f"{name}.{one}" for one in inner]
    for one, part in inner.items():
        live.add(f"{name}.{one}", inner_state(state, one), part, steady=False)
    return True


def dense_parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Indices and values, which share the tensor's memory."""
    plain = tensor.detach()
    if plain.layout is torch.sparse_coo:
        return {"indices": plain._indices(), "values": plain._values()}
    names = COMPRESSED[plain.layout]
    return {name: getattr(plain, name)() for name in names} | {"values": plain.values()}


def said_of(tensor: torch.Tensor) -> dict[str, Any]:
    """The description of a sparse tensor, beside indices and values (`state.composite_tensors`)."""
    dims = f", {tensor.sparse_dim()} sparse dims" if tensor.layout is torch.sparse_coo else ""
    context = f"{tuple(tensor.shape)}, {tensor.dtype}{dims}"
    parts = dict.fromkeys(dense_parts(tensor), "")
    return {"class": str(tensor.layout), "context": context, "parts": parts}


def _put(name: str, live: torch.Tensor, inner: dict[str, torch.Tensor]) -> None:
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
    is_first = (
        (steps != 0).to(torch.int8).cumsum(0).eq(1)
    )  # the first dim that differs, and those alike
    first = torch.where(is_first & (steps != 0), steps, 0).sum(0)
    return bool((first > 0).all())
