"""Durable steps from memory: an image to storage as it is, and the commit if rank 0 has died."""

from __future__ import annotations

import time

import msgspec

from holdfast.checkpoint.claiming import Claim
from holdfast.checkpoint.committing import commit
from holdfast.errors import StoreError
from holdfast.format.manifest import Manifest
from holdfast.memory.node import words as w
from holdfast.memory.node.machine import Slot
from holdfast.memory.node.pace import Pace
from holdfast.memory.node.segment import Segments, mapped
from holdfast.store import open_store
from holdfast.threads import in_threads

WRITE_BYTES = 8 << 20
WRITE_THREADS = 4
POLL_S = 0.25


def persist(segments: Segments, slot: Slot, order: w.Persist) -> None:
    """Write an image, durable when this returns.  Blocks; StoreError."""
    with mapped(segments.path(order.job, slot.name), slot.bytes) as view:
        writer = open_store(order.store).create(order.key, slot.bytes)
        pace = Pace(order.bytes_per_s)

        def one(start: int) -> None:
            pace.wait(WRITE_BYTES)
            with view[start : min(start + WRITE_BYTES, slot.bytes)] as part:
                writer.write(start, part)

        try:
            in_threads(one, list(range(0, slot.bytes, WRITE_BYTES)), WRITE_THREADS)
            writer.finish()
        except BaseException:
            writer.abort()
            raise


def commit_late(order: w.Persist, manifest: Manifest) -> None:
    """Commit when the files of all ranks are there.  Blocks; StoreError if they are not in time, UsageError
    if another run has taken the root since."""
    store = open_store(order.store)
    claim = msgspec.json.decode(order.claim, type=Claim)
    until = time.monotonic() + order.deadline_s
    while True:
        try:
            commit(store, manifest, claim)
            return
        except StoreError:
            if time.monotonic() > until:
                raise
            time.sleep(POLL_S)
