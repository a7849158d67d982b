"""States that an optimizer keeps of all its parameters together: torch's LBFGS, as one of the first.

Its vectors are the gradients of all parameters, one behind the other.  They mean nothing to an LBFGS that
has others, or in another order: it would fail in the next step, or go on with a wrong direction.
"""

from __future__ import annotations

import torch

from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.live.restore.groups import plain_states

VECTORS = ("d", "prev_flat_grad")


def misfit(checkpoint: Checkpoint, key: str, pairs: list[tuple[str, torch.Tensor]]) -> str:
    """Why an LBFGS over these parameters cannot go on with what was saved; empty if it can."""
    names = [name for name, _ in pairs]
    start = "an LBFGS keeps one vector of all its parameters together, and "
    tree = checkpoint.manifest.extras.get(key)
    groups = tree["$optimizer"]["groups"] if isinstance(tree, dict) else ()
    order = [name for group in groups for name in group["params"] if name in set(names)]
    if groups and order != names:
        return f"{start}it was saved of them in another order"
    total = sum(p.numel() * (2 if p.is_complex() else 1) for _, p in pairs)
    find = checkpoint.manifest.find
    places = [(name, find(f"{key}.{name}.{v}")) for name in names for v in VECTORS]
    saved = [(name, checkpoint.manifest.tensors[at].shape) for name, at in places if at is not None]
    if any(shape != (total,) or name != names[0] for name, shape in saved):
        lengths = dict.fromkeys(str(shape[0]) for _, shape in saved if shape)
        return f"{start}these have {total} elements here and had {', '.join(lengths)} when saved"
    others = {name for name, states in (plain_states(checkpoint, key) or {}).items() if states}
    return f"{start}was saved of several" if others & set(names[1:]) else ""
