"""One file of torch.save with the model's weights, as DeepSpeed's `zero_to_fp32` writes."""

from __future__ import annotations

from holdfast.checkpoint.opened import Checkpoint
from holdfast.writers.archive import Plan, Tensor, add_archive
from holdfast.writers.planned import Options, Planned, weights


def plan_torch(source: Checkpoint, options: Options, path: str) -> Planned:
    """A flat state dict; the names of a tied tensor share one storage."""
    tree: dict[str, Tensor] = {}
    for w in weights(source, options):
        for name in (w.name, *w.also):
            tree[name] = Tensor(w.dtype, w.shape, w.number, key=w.number)
    plan = Plan()
    add_archive(plan, tree)
    return Planned((plan.outfile(path),))
