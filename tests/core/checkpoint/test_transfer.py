"""A step is copied whole or not at all, byte for byte, wherever the copy stops."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import FSDP_TP, Tensor, build, memory, transformer
from holdfast.checkpoint import transfer as transferring
from holdfast.core.checkpoint.committing import commit
from holdfast.core.checkpoint.files import Files
from holdfast.core.checkpoint.names import committed, manifest_key, read_manifest, step_prefix
from holdfast.core.checkpoint.transfer import Provable, transfer, transfer_files
from holdfast.core.checkpoint.verifying import verify
from holdfast.core.codec.digest import digest_chunks, num_chunks
from holdfast.core.codec.table import DigestTable
from holdfast.errors import Corrupt, Exists, NotFound, StoreError
from holdfast.layout import Mesh
from holdfast.store import LocalStore, MemoryStore, Store
from holdfast.testing import Counting, StopAfter, Stopped
from holdfast.testing.wrappers import Operation, Wrapper

T = TypeVar("T")
LARGE = 400
"""Width of a model whose files have many digest chunks."""


def contents(store: Store) -> dict[str, bytes]:
    return {key: store.get(key) for key in store.list()}


def source_of(step: int = 5, **options: object) -> MemoryStore:
    store = memory()
    build(store, FSDP_TP, transformer(), step=step, **options)  # type: ignore[arg-type]
    return store


def flip(store: MemoryStore, key: str, at: int) -> None:
    data = bytearray(store.get(key))
    data[at] ^= 0x10
    store.put(key, data)


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_a_copy_is_the_same_byte_for_byte(tmp_path: Path, threads: int) -> None:
    source, disk, back = source_of(extras={"lr": 0.1}), LocalStore(tmp_path), memory()
    told: list[int] = []
    there = transfer(source, disk, 5, threads=threads, progress=told.append)
    home = transfer(disk, back, 5, threads=threads)
    assert contents(disk) == contents(back) == contents(source)
    assert verify(disk, 5).good
    assert (there.step, there.num_files, there.num_copied, there.is_new) == (5, 4, 4, True)
    assert there == home
    sizes = [len(data) for key, data in contents(source).items() if "safetensors" in key]
    assert there.bytes == sum(told) == sum(sizes)


def test_a_second_copy_reads_no_file_and_writes_nothing() -> None:
    source, target = Counting(source_of()), StopAfter(memory(), None)
    first = transfer(source, target, 5)
    written, read = len(target.operations), source.calls["open"]
    told: list[int] = []
    again = transfer(source, target, 5, progress=told.append)
    assert (again.num_copied, again.bytes, again.is_new) == (0, 0, False)
    assert (len(target.operations), source.calls["open"]) == (written, read)
    assert sum(told) == first.bytes


@pytest.mark.parametrize("look", ["transfer", "transfer_files"])
def test_what_is_there_already_is_proved_before_a_manifest_vouches_for_it(look: str) -> None:
    """One flipped byte behind a digest table that is right: the file is copied again."""
    source, target = source_of(), memory()
    transfer(source, target, 5)
    target.delete(manifest_key(5))
    damaged = next(key for key in target.list() if key.endswith(".safetensors"))
    flip(target, damaged, 1000)
    if look == "transfer":
        assert transfer(source, target, 5, dry_run=True).num_copied == 1
        assert transfer(source, target, 5).num_copied == 1
    else:
        manifest = read_manifest(source, 5)
        files = Files(source, step_prefix(5), manifest, verify=True)
        num_bytes = transfer_files(files, target, manifest.objects, look=True, threads=1)
        assert num_bytes == len(source.get(damaged))
    assert target.get(damaged) == source.get(damaged)


def test_every_byte_is_read_about_once() -> None:
    source = Counting(source_of())
    made = transfer(source, memory(), 5)
    tables = 2 * 8 * made.num_files
    manifest = len(source.inner.get(manifest_key(5)))
    assert source.bytes_read <= made.bytes + manifest + tables


@pytest.mark.parametrize("torn", [False, True])
def test_wherever_a_copy_stops_the_next_one_goes_on(torn: bool) -> None:
    source = source_of()
    whole = StopAfter(memory(), None)
    transfer(source, whole, 5)
    for n in range(1, len(whole.operations) + 1):
        target = memory()
        with suppress(Stopped):
            transfer(source, StopAfter(target, n, torn=torn), 5)
        for saved in committed(target):
            assert verify(target, saved.step).good
        arrived = sum(key.endswith(".safetensors") for key in target.list())
        made = transfer(source, target, 5)
        assert made.num_copied == 4 - arrived
        assert contents(target) == contents(source)


def test_parts_and_chunks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a few chunks, of less than one, and of a store that takes only large ones."""
    source = memory()
    build(source, FSDP_TP, transformer(width=LARGE), step=5)
    for part, block in ((4096, 4096), (1 << 19, 4096), (4096, 1 << 20)):
        monkeypatch.setattr(transferring, "COPY_PART_BYTES", part)
        target = _Blocks(memory(), block)
        transfer(source, target, 5)
        assert contents(target) == contents(source)
        most = max(part, block)
        assert {o for o, n in target.parts if o % most or n > most} == set()


class _Blocks(Wrapper):
    """A store whose writers take parts of `block_bytes` alone."""

    def __init__(self, inner: Store, block_bytes: int) -> None:
        super().__init__(inner)
        self.block_bytes = block_bytes
        self.parts: list[tuple[int, int]] = []

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        result = call()
        if operation.name == "create":
            write = result.write  # type: ignore[attr-defined]

            def noted(offset: int, data: memoryview) -> None:
                self.parts.append((offset, len(data)))
                write(offset, data)

            result.write = noted  # type: ignore[attr-defined]
            result.block_bytes = self.block_bytes  # type: ignore[attr-defined]
        return result


class Far(Wrapper):
    """A store that takes long to begin to answer: it asks for shorter ranges, and more of them at once.
    Each waits until as many are under way, once."""

    read_bytes, read_threads = 1 << 20, 6

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.ranges: set[int] = set()
        self._changed = threading.Condition()
        self._under_way = 0
        self.most = 0

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        if operation.name != "read":
            return call()
        with self._changed:
            self.ranges.add(operation.num_bytes)
            self._under_way += 1
            self.most = max(self.most, self._under_way)
            self._changed.notify_all()
            is_part = operation.num_bytes == self.read_bytes
            if is_part and not self._changed.wait_for(lambda: self.most >= self.read_threads, 20):
                raise AssertionError(f"{self.most} ranges at once")
        try:
            return call()
        finally:
            with self._changed:
                self._under_way -= 1


@pytest.mark.parametrize("layout", [Mesh(()), FSDP_TP], ids=["one-file", "four-files"])
def test_a_source_says_how_it_is_read(layout: Mesh) -> None:
    """How many ranges at once, and how long they are."""
    inner, target = memory(), memory()
    tensors = {"w": Tensor(np.arange(6 << 20, dtype="f4"))} if layout.world == 1 else {}
    build(inner, layout, tensors or transformer(width=3 * LARGE), step=5)
    source = Far(inner)
    transfer(source, target, 5)
    assert contents(target) == contents(inner)
    assert source.most == source.read_threads
    assert max(source.ranges) == source.read_bytes


def test_files_side_by_side_and_their_parts() -> None:
    part = transferring.COPY_PART_BYTES
    assert transferring.shares([part] * 20, 12) == (12, 1)
    assert transferring.shares([2 * part] * 20, 12) == (4, 3)
    assert transferring.shares([2 * part] * 2, 12) == (2, 6)
    assert transferring.shares([2 * part] * 20, 6) == (3, 2)
    assert transferring.shares([2 * part] * 2, 5) == (2, 2)
    assert transferring.shares([2 * part] * 20, 1) == (1, 1)
    assert transferring.shares([], 4) == (1, 4)


# -- what is damaged ------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["data", "table"])
def test_damage_in_the_source_does_not_arrive(place: str) -> None:
    source, target = memory(), memory()
    manifest = build(source, FSDP_TP, transformer(width=LARGE), step=5)
    file = manifest.file_of[2]
    at = file.table + 3 if place == "table" else 2 * manifest.chunk_bytes + 5
    key = step_prefix(5) + file.path
    flip(source, key, at)
    with pytest.raises(Corrupt) as caught:
        transfer(source, target, 5)
    error = caught.value
    assert (error.key, error.step) == (key, 5)
    assert error.start is not None and error.stop is not None
    assert error.start <= at < error.stop
    assert key not in target.list()
    assert committed(target) == []


def test_a_damaged_manifest_is_not_copied() -> None:
    source, target = source_of(), memory()
    flip(source, manifest_key(5), 200)
    with pytest.raises(Corrupt) as caught:
        transfer(source, target, 5)
    assert caught.value.step == 5
    assert target.list() == []


@pytest.mark.parametrize("damage", ["short", "table", "gone"])
def test_a_file_that_arrived_damaged_is_copied_again(damage: str) -> None:
    source, target = source_of(), memory()
    transfer(source, target, 5)
    key = next(k for k in target.list() if k.endswith("r00001.safetensors"))
    if damage == "short":
        target.put(key, target.get(key)[:-1])
    elif damage == "table":
        flip(target, key, target.size(key) - 1)
    else:
        target.delete(key)
    made = transfer(source, target, 5)
    assert (made.num_copied, made.is_new) == (1, False)
    assert contents(target) == contents(source)


# -- what is in the way ---------------------------------------------------------------------------


def test_another_step_of_that_number_stays() -> None:
    source, target = source_of(), source_of()
    before = contents(target)
    with pytest.raises(Exists, match="has another step 5") as caught:
        transfer(source, target, 5)
    assert caught.value.hint is not None
    assert contents(target) == before


def test_another_step_gives_way_where_that_is_said() -> None:
    source, target = source_of(), source_of()
    made = transfer(source, target, 5, replace=True)
    assert made.is_new
    assert contents(target) == contents(source)


def test_another_step_gives_way_only_to_a_whole_one() -> None:
    source, target = source_of(), source_of()
    old = verify(target, 5)
    whole = StopAfter(memory(), None)
    transfer(source, whole, 5)
    for n in range(1, len(whole.operations) + 2):
        with suppress(Stopped):
            transfer(source, StopAfter(target, n), 5, replace=True)
        assert verify(target, 5).good
    assert old.good


def test_two_steps_of_one_attempt_are_never_mixed() -> None:
    source, target = memory(), memory()
    manifest = build(source, FSDP_TP, transformer(), step=5)
    transfer(source, target, 5)
    other = msgspec.structs.replace(manifest, created="2020-01-01T00:00:00Z")
    source.delete(manifest_key(5))
    commit(source, other)
    with pytest.raises(Exists, match="of an attempt of the same name"):
        transfer(source, target, 5, replace=True)


def test_a_step_that_is_not_there() -> None:
    with pytest.raises(NotFound, match="no step 7") as caught:
        transfer(source_of(), memory(), 7)
    assert caught.value.hint == "steps there: 5"


def test_two_copies_at_once() -> None:
    source, target = source_of(), memory()
    made, barrier = [], threading.Barrier(4)

    def one() -> None:
        barrier.wait()
        made.append(transfer(source, target, 5))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    assert contents(target) == contents(source)


def test_a_file_that_is_swept_before_the_commit_is_missed() -> None:
    """A training that holds the target may delete what its claims do not know."""
    source, target = source_of(), _Sweeping(memory())
    with pytest.raises(StoreError, match="is gone again"):
        transfer(source, target, 5)
    assert committed(target.inner) == []


class _Sweeping(Wrapper):
    """A store that loses its first file when the last one is finished."""

    finished = 0

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        result = call()
        self.finished += operation.name == "finish"
        if self.finished == 4:
            self.finished = 0
            self.inner.delete(self.inner.list("steps/")[0])
        return result


def test_progress_that_raises_ends_a_copy() -> None:
    class EnoughError(Exception):
        pass

    def stop(_: int) -> None:
        raise EnoughError

    target = memory()
    with pytest.raises(EnoughError):
        transfer(source_of(), target, 5, progress=stop)
    assert target.list() == []


def test_what_lies_beside_a_manifest_for_other_loaders_is_copied() -> None:
    source, target = source_of(), memory()
    source.put(f"{step_prefix(5)}model.safetensors.index.json", b"{}")
    source.put(f"{step_prefix(5)}notes.txt", b"of somebody")
    transfer(source, target, 5)
    assert target.get(f"{step_prefix(5)}model.safetensors.index.json") == b"{}"
    assert f"{step_prefix(5)}notes.txt" not in target.list()


def test_a_step_without_tensors() -> None:
    source, target = memory(), memory()
    build(source, Mesh(()), {"w": Tensor(np.zeros((0,), "f4"))}, step=1, extras={"a": 1})
    assert transfer(source, target, 1).is_new
    assert contents(target) == contents(source)


# -- one object -----------------------------------------------------------------------------------


def table_of(data: bytes, chunk_bytes: int) -> DigestTable:
    digests = np.empty(num_chunks(len(data), chunk_bytes), "<u8")
    digest_chunks(memoryview(data), digests, chunk_bytes)
    return DigestTable(digests, len(data), chunk_bytes)


@given(
    st.lists(st.tuples(st.integers(0, 70), st.integers(1, 9000)), max_size=3),
    st.integers(1, 3000),
    st.data(),
)
def test_any_range_of_any_tables(
    regions: list[tuple[int, int]], tail: int, data: st.DataObject
) -> None:
    """Regions that have tables lie anywhere in an object; a changed byte in one is always found."""
    random = np.random.default_rng(0)
    whole, tables, covered = b"", [], []
    for gap, length in regions:
        body = random.bytes(length)
        at = len(whole) + gap
        whole += bytes(gap) + body
        tables.append((at, table_of(body, 4096)))
        covered.append((at, at + length))
    whole += random.bytes(tail)
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = data.draw(st.integers(start + 1, len(whole)))
    store = memory()
    store.put("a", whole)
    this = Provable("a", len(whole), tuple(tables))
    scratch = memoryview(bytearray(stop - start + 2 * 4096))
    assert this.read(store.open("a"), start, scratch, stop) == whole[start:stop]
    inside = [i for i in range(start, stop) if any(a <= i < b for a, b in covered)]
    if inside:
        flip(store, "a", data.draw(st.sampled_from(inside)))
        with pytest.raises(Corrupt):
            this.read(store.open("a"), start, scratch, stop)
