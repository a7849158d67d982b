"""Order in which the dims of an optimizer's state lie in memory, where that is not the usual one.

The values of a matrix and of its transposed copy are the same, but a product with it may be computed in
another order, and differ in its last bit.  An optimizer that keeps a basis as `torch.linalg.eigh` or a
transposition has made it goes on exactly only from memory that lies alike.  What a checkpoint holds is in
row-major order, so for such states the order of the dims is kept beside it, and memory that a restore makes
is made so.  Memory that is there already stays as it is.  Tensors inside lists and dicts have their paths
behind the name of the state: `Q[0]`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Orders = dict[str, dict[str, list[int]]]
"""Orders of dims, by the name of the parameter and the path of the state."""


def note_order(orders: Orders, at: tuple[str, str], state: Tensor, p: Tensor | None) -> None:
    """Note the dims of a state, from the outermost to the innermost in memory, unless a restore makes it so
    in any case: row-major, or like its parameter `p` if that is given and has its shape."""
    if state.is_contiguous() and (p is None or p.is_contiguous()):
        return
    is_plain = state.layout is torch.strided and not isinstance(state, DTensor)
    if state.ndim < 2 or not is_plain or isinstance(p, DTensor):
        return
    alike = p is not None and state.shape == p.shape
    usual = torch.empty_like(p, device="meta") if alike else torch.empty(state.shape, device="meta")
    if state.stride() != usual.stride():
        order = sorted(range(state.ndim), key=lambda d: (-state.stride(d), d))
        orders.setdefault(at[0], {})[at[1]] = order
