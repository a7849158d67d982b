"""Order in which the dims of an optimizer's state lie in memory, where that is not the usual one.

The values of a matrix and of its transposed copy are the same, but a product with it may be computed in
another order, and differ in its last bit.  An optimizer that keeps a basis as `torch.linalg.eigh` or a
transposition has made it goes on exactly only from memory that lies alike.  What a checkpoint holds is in
row-major order, so for such states the order of the dims is kept beside it, and memory that a restore makes
is made so.  Memory that is there already stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from holdfast.errors import FormatError


def order_of(state: torch.Tensor, p: torch.Tensor) -> list[int] | None:
    """Dims of a state of parameter `p` from the outermost to the innermost in memory; None if a restore
    makes it so in any case: like the parameter if it has its shape, else row-major."""
    if state.ndim < 2 or (state.is_contiguous() and p.is_contiguous()):
        return None
    if isinstance(state, DTensor) or isinstance(p, DTensor):
        return None
    if state.shape == p.shape:
        usual = torch.empty_like(p, device="meta")
    else:
        usual = torch.empty(state.shape, device="meta")
    if state.stride() == usual.stride():
        return None
    return sorted(range(state.ndim), key=lambda d: (-state.stride(d), d))


def empty_in(
    order: Sequence[int],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    name: str,
) -> torch.Tensor:
    """Memory for a state of that shape with its dims in that order.  FormatError if it is none."""
    if sorted(order) != list(range(len(shape))):
        raise FormatError(
            f"malformed extras: {name!r} of shape {shape} lies in the order {order!r}"
        )
    outer = torch.empty([shape[d] for d in order], dtype=dtype, device=device)
    return outer.permute([list(order).index(d) for d in range(len(shape))])
