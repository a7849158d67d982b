"""Copying the records of a root into another store, every byte verified on the way.  Torch-free.

Records have no commit: a recorded step counts once the segments of all ranks are there, and each appears
whole or not at all.  So segments are copied in any order, after the plans, without which records cannot be
read.  A segment's header is verified by the digest before it, its records by their digest tables, and these
by digests in the header.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from holdfast.base.errors import Corrupt, Exists, FormatError, NotFound
from holdfast.base.threads import in_threads
from holdfast.core.checkpoint.recorded import segments
from holdfast.core.checkpoint.transfer import Progress, Provable, copy_object, shares, threads_of
from holdfast.core.codec.table import DigestTable
from holdfast.core.store import Store
from holdfast.tiers.records.log import LogSegment, read_headers
from holdfast.tiers.records.segment import HEAD_BYTES, plan_key, read_plan

Plans = dict[str, tuple[bytes, int]]
"""Plans by key: their bytes, and the chunk size of their records."""


@dataclass
class TransferredLog:
    """The result of copying records."""

    num_files: int = 0
    """Segments that are sound in the source."""
    num_copied: int = 0
    """Segments that were not there yet."""
    bytes: int = 0
    """Bytes of these."""
    problems: dict[str, str] = field(default_factory=dict)
    """The faults of segments that were not copied, by key."""


def transfer_log(
    source: Store,
    target: Store,
    since: int = 0,
    *,
    dry_run: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> TransferredLog:
    """Copy the records after step `since` of one root into another.  Blocks.

    May be called again after any error: segments that have arrived are not copied again.  A damaged one is
    left out, and named in the result.  `progress` is called with the bytes copied.  `dry_run`: nothing is
    written, and the result states what would be.
    """
    threads = threads or threads_of(source)
    keys = segments(source, since)
    sound = _sound(source, keys, threads)
    done = TransferredLog(num_files=len(sound))
    for key in sorted({*keys} - {one.key for one in sound}):
        if source.list(key):  # else it was deleted after it was listed
            done.problems[key] = "its header is damaged"
    work = _Segments(source, target, set(target.list("log/")), done, progress or (lambda _: None))
    plans = work.plans(sound)
    if not dry_run:
        for key, (data, _) in plans.items():
            target.put(key, data)
    sizes = [sum(record.bytes for record in one.header.records) for one in sound]
    side_by_side, in_each = shares(sizes, threads)
    in_threads(lambda one: work.copy(one, plans, dry_run, in_each), sound, side_by_side)
    return done


def _sound(source: Store, keys: Sequence[str], threads: int) -> list[LogSegment]:
    """Segments whose headers can be read, in the order of their keys."""
    found: list[LogSegment] = []
    in_threads(lambda key: found.extend(read_headers(source, [key])), list(keys), threads)
    return sorted(found, key=lambda one: one.key)


class _Segments:
    """Segments on their way from one store into another."""

    def __init__(
        self, source: Store, target: Store, there: set[str], done: TransferredLog, tell: Progress
    ) -> None:
        self.source = source
        self.target = target
        self.there = there
        self.done = done
        self.tell = tell
        self._lock = threading.Lock()

    def plans(self, sound: Sequence[LogSegment]) -> Plans:
        """The plans of segments, verified; damaged ones are named in the result."""
        found: Plans = {}
        for run, name in sorted({(s.header.run, s.header.plan) for s in sound}):
            key = plan_key(run, name)
            try:
                plan = read_plan(self.source, run, name)
                found[key] = self.source.get(key), plan.chunk_bytes
            except (FormatError, NotFound) as error:
                self.done.problems[key] = error.message
        return found

    def copy(self, segment: LogSegment, plans: Plans, dry_run: bool, threads: int) -> None:
        """Copy a segment unless it is there, `threads` parts at once."""
        plan = plans.get(plan_key(segment.header.run, segment.header.plan))
        if plan is None:
            return  # its records cannot be read
        try:
            file = provable(self.source, segment, plan[1])
            if self._is_there(file):
                return
            if not dry_run:
                if file.key in self.there:  # damaged
                    self.target.delete(file.key)
                copy_object(file, self.source, self.target, threads, self.tell)
        except (Corrupt, NotFound, Exists) as error:
            with self._lock:
                self.done.problems[segment.key] = error.message
            return
        with self._lock:
            self.done.num_copied += 1
            self.done.bytes += file.num_bytes

    def _is_there(self, file: Provable) -> bool:
        """True if a segment was copied before.  Exists if the target has another one under its key.

        Compares their heads: a head has the digest of the header, which has digests of all records.
        """
        if file.key not in self.there:
            return False
        (_, expected), *_ = file.known
        found = bytearray(len(expected))
        try:
            self.target.read(file.key, 0, memoryview(found))
        except (Corrupt, NotFound):
            found = bytearray()
        is_same = found == expected
        if is_same and self.target.size(file.key) == file.num_bytes:
            return True
        if not is_same and read_headers(self.target, [file.key]):
            raise Exists(f"{self.target.url} has other records of that name", key=file.key)
        return False


def provable(source: Store, segment: LogSegment, chunk_bytes: int) -> Provable:
    """A segment, to be verified by the digests in its head and header.  Reads its digest tables."""
    head, tables = bytearray(HEAD_BYTES), []
    with closing(source.open(segment.key)) as reader:
        reader.read(0, memoryview(head))
        known = [(0, bytes(head))]
        for record in segment.header.records:
            at = segment.start + record.at
            data = bytearray(record.bytes - record.table)
            reader.read(at + record.table, memoryview(data))
            table = DigestTable.of(data, record.digest, record.table, chunk_bytes)
            tables.append((at, table))
            known.append((at + record.table, bytes(data)))
    length = int.from_bytes(head[8:16], "little")
    of_header = DigestTable(np.frombuffer(head[16:24], "<u8"), length, max(length, 1))
    size = source.size(segment.key)
    return Provable(segment.key, size, ((HEAD_BYTES, of_header), *tables), tuple(known))
