"""holdfast's own format with every tensor whole: an ordinary step that Hugging Face's loaders open too."""

from __future__ import annotations

from holdfast.checkpoint.consolidating import Consolidation, plan_consolidation
from holdfast.checkpoint.opened import Checkpoint
from holdfast.store import Store
from holdfast.writers.planned import WriteOptions


def attempt_name(identity: str) -> str:
    """Return the attempt name of a step, by the identity of the conversion that writes it."""
    return f"convert-{identity}"


def plan_universal(
    source: Checkpoint, target: Store, identity: str, options: WriteOptions
) -> Consolidation:
    """Plan a step of `target`; the same `identity` gives the same files."""
    return plan_consolidation(source, target, attempt_name(identity), options.max_file_bytes)
