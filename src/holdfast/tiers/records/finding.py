"""What can be known of records without a replay: whether their files are there, and their extras."""

from __future__ import annotations

from typing import Any

from holdfast.base.errors import NotFound
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.store.views import JoinedStore
from holdfast.live.saving.merging import merge_extras
from holdfast.live.saving.messages import ReadyToSave, sort_extras
from holdfast.tiers.records.log import Log, RecordedStep


def num_there(log: Log, steps: list[RecordedStep], rank: int, size: int) -> int:
    """Return how many of these steps, from the first on, have records in files of sufficient length.

    Looks at the records of every `size`-th rank, from `rank` on.
    """
    lengths: dict[str, int] = {}
    for number, step in enumerate(steps):
        for segment, record in [step.records[r] for r in sorted(step.records)[rank::size]]:
            if segment.key not in lengths:
                lengths[segment.key] = _length(log, segment.key)
            if lengths[segment.key] < segment.start + record.at + record.bytes:
                return number
    return len(steps)


def _length(log: Log, key: str) -> int:
    """Length of a segment, or of its longest copy if there are two homes; -1 if it is nowhere."""
    store = log.store
    lengths = [-1]
    for one in (store.first, store.second) if isinstance(store, JoinedStore) else (store,):
        try:
            lengths.append(one.size(key))
        except NotFound:
            continue
    return max(lengths)


def checkpoint_of(log: Log, step: RecordedStep) -> Checkpoint:
    """A recorded step as a checkpoint, with its extras."""
    return log.open(step, *recorded_extras(log, step))


def recorded_extras(log: Log, step: RecordedStep) -> tuple[dict[str, Any], dict[str, Any]]:
    """Extras that all ranks share, and the keys of each rank's own, as in the manifest of a full save."""
    ready = [
        ReadyToSave(step.step, False, "", "", record.notes)
        for _, (_, record) in sorted(step.records.items())
    ]
    per_rank, send = sort_extras(ready)
    raw = log.open(step, {}, {})
    extras = {k: v for k, v in raw.rank_extras(0).items() if k not in per_rank}
    for key, ranks in send.items():
        versions = [extras[key]] if key in extras else []
        versions += [raw.rank_extras(r)[key] for r in ranks if r != 0]
        extras[key] = merge_extras(key, versions)
    return extras, per_rank
