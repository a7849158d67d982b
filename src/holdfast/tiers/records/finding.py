"""What can be known of records without a replay: their extras, whether their files are there, and sound.

Records may lie in two homes, which have the same bytes under one key (`mirror.records`).  So once a file of
records is found damaged in the root, all ranks read it from the home behind.  A damaged header is found
when the log is surveyed, a damaged record only when it is replayed: to verify everything before would be to
read the log twice.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from holdfast.base.errors import FormatError, NotFound, UnsupportedVersion
from holdfast.base.events import emit
from holdfast.base.wire import decode_json
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.peers import raise_on_all
from holdfast.core.checkpoint.reading import BLOCK_CHUNKS
from holdfast.core.codec.digest import num_chunks
from holdfast.core.format.manifest import FileEntry
from holdfast.core.group import Group
from holdfast.core.store import Store
from holdfast.core.store.views import JoinedStore
from holdfast.live.saving.merging import merge_extras
from holdfast.live.saving.messages import ReadyToSave, sort_extras
from holdfast.tiers.records.log import Log, LogSegment, RecordedStep, read_headers


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
    """A recorded step as a checkpoint, with the extras that all ranks share, and the keys of each rank's
    own, as in the manifest of a full save."""
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
    return log.open(step, extras, per_rank)


# -- of two homes ------------------------------------------------------------------------------------


def headers_behind(store: Store, keys: Iterable[str], group: Group) -> list[LogSegment]:
    """Read from the second of two homes the headers that cannot be read in the first.  Collective."""
    if not isinstance(store, JoinedStore):
        return []
    found = read_headers(store.second, keys)
    _take_all(store, [one.key for one in found], group)
    return found


def take_copies(log: Log, step: RecordedStep, group: Group) -> bool:
    """Have the log read a step's damaged records from the home behind, where they are sound.  Each rank
    checks its share.  Collective; True if any more file is read from there now."""
    store = log.store
    if not isinstance(store, JoinedStore):
        return False
    keys: list[str] = []
    with raise_on_all(group, step.step):
        here, behind = log.open(step, {}, {}), log.open(step, {}, {}, store.second)
        for file in here.manifest.files[group.rank :: group.size]:
            key = step.records[file.rank][0].key
            if key not in store.damaged and not _is_sound(here, file) and _is_sound(behind, file):
                emit("log.damaged", key=key, error=f"its record of step {step.step} is damaged")
                keys.append(key)
    return _take_all(store, keys, group)


def _take_all(store: JoinedStore, keys: list[str], group: Group) -> bool:
    """Have files that any rank has found damaged read from the second home.  True if there are any."""
    shared = [decode_json(d, set[str]) for d in group.all_gather(msgspec.json.encode(keys))]
    store.damaged.update(*shared)
    return any(shared)


def _is_sound(checkpoint: Checkpoint, file: FileEntry) -> bool:
    """True if all bytes of a file have their digests."""
    files, size = checkpoint.images, checkpoint.manifest.chunk_bytes
    scratch = memoryview(bytearray(BLOCK_CHUNKS * size))
    count = num_chunks(file.table, size)
    try:
        with files.readers.kept():
            for first in range(0, count, BLOCK_CHUNKS):
                files.chunks(file, first, min(first + BLOCK_CHUNKS, count), scratch)
    except UnsupportedVersion:
        raise
    except (FormatError, NotFound):
        return False
    return True
