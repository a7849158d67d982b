"""Records are copied whole, every byte proved, and again only where they are missing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import numpy as np
import pytest

from builders import memory
from holdfast.core.codec.digest import CHUNK_BYTES, digest_chunks, hexdigest, num_chunks
from holdfast.store import MemoryStore, Store
from holdfast.testing import StopAfter, Stopped
from holdfast.testing.wrappers import Operation, Wrapper
from holdfast.tiers.records.segment import (
    Record,
    SegmentHeader,
    SegmentPlan,
    aligned,
    encode_header,
    plan_key,
    put_plan,
    segment_key,
)
from holdfast.tiers.records.transfer import transfer_log

T = TypeVar("T")

DATA_BYTES = 3 * CHUNK_BYTES + 100
RUN = 5


def put_segment(store: Store, first: int, last: int, rank: int, *, seed: int = 0) -> str:
    """A segment whose records are random bytes, under the plan of all of them."""
    plan = put_plan(store, RUN, SegmentPlan((), (), (), {}))
    random = np.random.default_rng((seed, first, rank))
    records, body, at = [], b"", 0
    for step in range(first, last + 1):
        data = random.bytes(DATA_BYTES)
        table = np.empty(num_chunks(DATA_BYTES), "<u8")
        digest_chunks(memoryview(data), table)
        image = data + table.tobytes()
        told = (step, (RUN, step - 1), len(image), 0, DATA_BYTES, DATA_BYTES, ())
        records.append(Record(*told, at=at, digest=hexdigest(table.tobytes())))  # type: ignore[arg-type]
        body += image.ljust(aligned(len(image)), b"\0")
        at = len(body)
    header = SegmentHeader(RUN, rank, 2, plan, {}, records=tuple(records))
    key = segment_key(RUN, first, last, rank)
    store.put(key, encode_header(header) + body)
    return key


@pytest.fixture
def source() -> MemoryStore:
    store = memory()
    for first in (1, 3, 5):
        for rank in (0, 1):
            put_segment(store, first, first + 1, rank)
    store.put("log/0000000005/notes.txt", b"of somebody")
    return store


def contents(store: Store) -> dict[str, bytes]:
    return {key: store.get(key) for key in store.list() if not key.endswith(".txt")}


def test_all_records(source: MemoryStore) -> None:
    target, told = memory(), list[int]()
    done = transfer_log(source, target, progress=told.append)
    assert (done.num_files, done.num_copied, done.problems) == (6, 6, {})
    assert done.bytes == sum(told)
    assert contents(target) == contents(source)
    assert "log/0000000005/notes.txt" not in target.list()


def test_a_source_says_how_many_headers_and_records_are_read_at_once(source: MemoryStore) -> None:
    far, target = Far(source), memory()
    transfer_log(far, target)
    assert contents(target) == contents(source)
    assert far.most == far.read_threads


class Far(Wrapper):
    """A store that asks for six reads at once, which wait for one another, once."""

    read_threads = 6

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._changed = threading.Condition()
        self._under_way = 0
        self.most = 0

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        if operation.name != "read":
            return call()
        with self._changed:
            self._under_way += 1
            self.most = max(self.most, self._under_way)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self.most == self.read_threads, 20):
                raise AssertionError(f"{self.most} reads at once")
        try:
            return call()
        finally:
            with self._changed:
                self._under_way -= 1


def test_records_after_a_step(source: MemoryStore) -> None:
    target = memory()
    assert transfer_log(source, target, since=3).num_copied == 4
    assert segment_key(RUN, 1, 2, 0) not in target.list()
    assert segment_key(RUN, 3, 4, 0) in target.list()


def test_a_second_copy_copies_nothing(source: MemoryStore) -> None:
    target = StopAfter(memory(), None)
    transfer_log(source, target)
    before = sum(o.name != "put" for o in target.operations)
    assert transfer_log(source, target).num_copied == 0
    assert sum(o.name != "put" for o in target.operations) == before


def test_a_dry_run_writes_nothing(source: MemoryStore) -> None:
    target = memory()
    assert transfer_log(source, target, dry_run=True).num_copied == 6
    assert target.list() == []


def test_wherever_it_stops_the_next_one_goes_on(source: MemoryStore) -> None:
    whole = StopAfter(memory(), None)
    transfer_log(source, whole, threads=1)
    for n in range(1, len(whole.operations) + 1):
        target = memory()
        with suppress(Stopped):
            transfer_log(source, StopAfter(target, n), threads=1)
        arrived = sum(key.endswith(".log") for key in target.list())
        assert transfer_log(source, target).num_copied == 6 - arrived
        assert contents(target) == contents(source)


@pytest.mark.parametrize("place", ["magic", "header", "data", "table", "cut"])
def test_a_damaged_segment_is_left_out_and_named(source: MemoryStore, place: str) -> None:
    key, target = segment_key(RUN, 3, 4, 1), memory()
    data = bytearray(source.get(key))
    start = aligned(24 + int.from_bytes(data[8:16], "little"))
    at = {"magic": 2, "header": 30, "data": start + CHUNK_BYTES, "table": start + DATA_BYTES + 1}
    if place == "cut":
        del data[-100_000:]
    else:
        data[at[place]] ^= 1
    source.put(key, data)
    done = transfer_log(source, target)
    assert list(done.problems) == [key]
    assert done.num_copied == 5
    assert key not in target.list()


def test_without_its_plan_a_segment_stays(source: MemoryStore) -> None:
    (plan,) = (key for key in source.list("log/") if "plan-" in key)
    source.put(plan, b"{}")
    done = transfer_log(source, memory())
    assert list(done.problems) == [plan]
    assert done.num_copied == 0


def test_other_records_of_that_name_stay(source: MemoryStore) -> None:
    target = memory()
    key = put_segment(target, 3, 4, 0, seed=1)
    before = target.get(key)
    done = transfer_log(source, target)
    assert "has other records of that name" in done.problems[key]
    assert (target.get(key), done.num_copied) == (before, 5)


def test_a_segment_that_arrived_damaged_is_copied_again(source: MemoryStore) -> None:
    target = memory()
    transfer_log(source, target)
    target.put(segment_key(RUN, 3, 4, 0), b"short")
    assert transfer_log(source, target).num_copied == 1
    assert contents(target) == contents(source)


def test_plans_are_the_same_bytes(source: MemoryStore) -> None:
    """A plan's name is the digest of its bytes, so these must be the very ones."""
    target = memory()
    transfer_log(source, target)
    (plan,) = (key for key in target.list() if "plan-" in key)
    name = hexdigest(target.get(plan))
    assert plan == plan_key(RUN, name)
