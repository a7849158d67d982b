"""One file of torch.save with the model's weights, as DeepSpeed's `zero_to_fp32` writes."""

from __future__ import annotations

from holdfast.checkpoint.opened import Checkpoint
from holdfast.writers.archive import ArchivedTensor, ArchivePlan, add_archive
from holdfast.writers.planned import Planned, WriteOptions, weights


def plan_torch(source: Checkpoint, options: WriteOptions, path: str) -> Planned:
    """A flat state dict; the names of a tied tensor share one storage."""
    tree: dict[str, ArchivedTensor] = {}
    for w in weights(source, options):
        for name in (w.name, *w.also):
            tree[name] = ArchivedTensor(w.dtype, w.shape, w.number, key=w.number)
    plan = ArchivePlan()
    add_archive(plan, tree)
    return Planned((plan.outfile(path),))
