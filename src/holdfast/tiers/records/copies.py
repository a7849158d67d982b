"""Records that are damaged in the root, and sound in the home behind it.

Both homes have the same bytes under one key (`mirror.records`), so a file of records that proves damaged
in the root is taken from the home behind, from then on and by all ranks.  A header proves damaged when the
log is surveyed, a record not before it is replayed: to look at all bytes of both would be to read the log
twice.
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
from holdfast.tiers.records.log import Log, LogSegment, RecordedStep, read_headers


def headers_behind(store: Store, keys: Iterable[str], group: Group) -> list[LogSegment]:
    """Headers of segments, which cannot be read in the first of two homes, from the second.  Collective."""
    if not isinstance(store, JoinedStore):
        return []
    found = read_headers(store.second, keys)
    _take_all(store, [one.key for one in found], group)
    return found


def take_copies(log: Log, step: RecordedStep, group: Group) -> bool:
    """Take what is damaged of a step's records from the home behind, where it is sound.  Each rank looks at
    its share.  Collective; True if anything is taken from there now that was not before."""
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
    """Take what any rank has found damaged from the second home.  True if there is anything."""
    shared = [decode_json(d, set[str]) for d in group.all_gather(msgspec.json.encode(keys))]
    store.damaged.update(*shared)
    return any(shared)


def _is_sound(checkpoint: Checkpoint, file: FileEntry) -> bool:
    """True if all bytes of a file are what was written."""
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
