"""The agent's part in durable steps: it writes images to storage, and commits if rank 0 has died."""

from __future__ import annotations

import time

import msgspec

from holdfast.base.errors import Corrupt, NotFound, StoreError, UsageError
from holdfast.base.threads import in_threads
from holdfast.base.wire import decode_json
from holdfast.core.checkpoint.claiming import Claim, check_claim, newest_claim
from holdfast.core.checkpoint.committing import check_lengths, commit
from holdfast.core.checkpoint.listing import attempt_of
from holdfast.core.checkpoint.names import manifest_key
from holdfast.core.codec.digest import CHUNK_BYTES
from holdfast.core.codec.table import DigestTable
from holdfast.core.format.manifest import Manifest
from holdfast.core.store import Store, be_patient, open_store
from holdfast.core.store.contract import part_bytes
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.messages import Slot
from holdfast.tiers.memory.node.segment import Segments, mapped, table_in
from holdfast.tiers.memory.node.throttle import Throttle

WRITE_BYTES = 32 * CHUNK_BYTES
WRITE_THREADS = 4
POLL_S = 0.25
SECOND_LOOK_S = 1.0


def persist(segments: Segments, slot: Slot, order: w.Persist, throttle: Throttle) -> None:
    """Write an image, durable when this returns.  Blocks; StoreError.

    UsageError for a flush into a root that no longer exists: a file would bring its directory back.
    Corrupt if memory has changed since the image was digested: then nothing is left in storage.  An image
    that is there already is not written again: a file gets its name only when it is whole.
    """
    store = open_store(order.store)
    be_patient(store, None)  # ranks wait for the agent, and not for storage
    if order.claim and not order.pid and newest_claim(store) is None:
        check_claim(store, decode_json(order.claim, Claim))
    if _is_stored(store, order.key, slot.bytes):
        return
    with mapped(segments.path(order.job, slot.name), slot.bytes) as view:
        table = _table_of(view, slot)
        writer = store.create(order.key, slot.bytes)
        part_of_file = part_bytes(writer, WRITE_BYTES)

        def one(start: int) -> None:
            stop = min(start + part_of_file, slot.bytes)
            throttle.wait(stop - start, w.STORED)
            with view[start:stop] as part:
                writer.write(start, part)
                with part[: max(slot.table - start, 0)] as digested:
                    _check(table, start, digested, slot)

        try:
            in_threads(one, list(range(0, slot.bytes, part_of_file)), WRITE_THREADS)
            writer.finish()
        except BaseException:
            writer.abort()
            raise


def _is_stored(store: Store, key: str, size: int) -> bool:
    try:
        return store.size(key) == size
    except NotFound:
        return False


def _table_of(view: memoryview, slot: Slot) -> DigestTable:
    """Return the digests of an image's chunks; Corrupt if the slot's header has another digest of them."""
    try:
        return table_in(view, slot.table, slot.digest)
    except Corrupt as error:
        raise _changed(slot, "table of digests", error) from None


def _check(table: DigestTable, start: int, part: memoryview, slot: Slot) -> None:
    """Corrupt unless bytes from `start` on, a multiple of a chunk, are what was digested."""
    try:
        table.check(start // CHUNK_BYTES, part)
    except Corrupt as error:
        chunk = (error.start or 0) // CHUNK_BYTES
        raise _changed(slot, f"chunk {chunk}", error) from None


def _changed(slot: Slot, what: str, error: Corrupt) -> Corrupt:
    """Return the error of an image that is not what was digested, with the place in it."""
    return Corrupt(
        f"rank {slot.rank}'s image of step {slot.step} changed in memory before it was in storage: "
        f"its {what} has digest {error.found}, not {error.expected}",
        start=error.start,
        stop=error.stop,
        expected=error.expected,
        found=error.found,
    )


def commit_late(order: w.Persist, manifest: Manifest) -> None:
    """Commit when the files of all ranks are there.  Blocks; StoreError if they are not in time, UsageError
    if another run has taken the root since.

    If rank 0 died before it had written the files beside the step, it is committed without them.

    A run that takes the root at this moment deletes files that it does not know.  So the step is checked
    once more, and its manifest deleted if it is not whole.
    """
    store = open_store(order.store)
    be_patient(store, None)  # ranks wait for the agent, and not for storage
    claim = decode_json(order.claim, Claim)
    until = time.monotonic() + order.deadline_s
    while True:
        try:
            commit(store, manifest, claim)
            break
        except StoreError:
            if manifest.attached is not None and _lacks_only_files(store, manifest):
                manifest = msgspec.structs.replace(manifest, attached=None)
            elif time.monotonic() > until:
                raise
            else:
                time.sleep(POLL_S)
    try:
        time.sleep(SECOND_LOOK_S)
        check_claim(store, claim)
        check_lengths(store, manifest)
    except (StoreError, UsageError):
        if attempt_of(store, manifest.step) == manifest.attempt and not _is_whole(store, manifest):
            store.delete(manifest_key(manifest.step))
        raise


def _lacks_only_files(store: Store, manifest: Manifest) -> bool:
    """True if the images are there, but not the files beside them, which rank 0 had: it is dead."""
    without = msgspec.structs.replace(manifest, attached=None)
    return _is_whole(store, without) and not _is_whole(store, manifest)


def _is_whole(store: Store, manifest: Manifest) -> bool:
    try:
        check_lengths(store, manifest)
    except StoreError:
        return False
    return True
