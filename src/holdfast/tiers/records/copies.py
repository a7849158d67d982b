"""Records that are damaged in the root, and sound in the home behind it.

Both homes have the same bytes under one key (`mirror.records`).  So once a file of records is found damaged
in the root, all ranks read it from the home behind.  A damaged header is found when the log is surveyed, a
damaged record only when it is replayed: to verify everything before would be to read the log twice.
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
