"""Order in which the dims of an optimizer's state lie in memory, where that is not the usual one.

The values of a matrix and of its transposed copy are the same, but a product with it may be computed in
another order, and differ in its last bit.  An optimizer that keeps a basis as `torch.linalg.eigh` or a
transposition has made it goes on exactly only from memory that lies alike.  What a checkpoint holds is in
row-major order, so for such states the order of the dims is kept beside it, and memory that a restore makes
is made so.  Memory that is there already stays as it is.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def order_of(state: torch.Tensor, p: torch.Tensor) -> list[int] | None:
    """Dims of a state of parameter `p` from the outermost to the innermost in memory; None if a restore
    makes it so in any case: like the parameter if it has its shape, else row-major."""
    is_flat = state.ndim < 2 or state.layout is not torch.strided
    if is_flat or (state.is_contiguous() and p.is_contiguous()):
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
