"""A test suite for a `Store`: does it keep the promises of the contract?

    class TestMyStore(StoreTests):
        @pytest.fixture
        def store(self) -> Store:
            return MyStore(...)            # empty, one per test

The tests state the promises of `Store`, including those under concurrent use.  They need pytest only for
the fixture, so this module imports without it.
"""

from __future__ import annotations

import array
import itertools
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from holdfast.base.errors import Corrupt, Exists, NotFound, UsageError
from holdfast.core.store import delete_many, keys_below
from holdfast.core.store.contract import Store, Writer

T = TypeVar("T")
P = ParamSpec("P")
E = TypeVar("E", bound=BaseException)

BAD_KEYS = (
    "",
    "/",
    "/etc/passwd",
    "a/",
    "a//b",
    ".",
    "..",
    "../a",
    "a/../b",
    "a/./b",
    "a/..",
    "a\0b",
    "a\\b",
    ".tmp-a",
    "a/.tmp-b",
    "\ud800",
    "a" * 1025,
)


def raised(kind: type[E], call: Callable[P, object], *args: P.args, **named: P.kwargs) -> E:
    """Return the error of this kind that the call raises; AssertionError if it raises none."""
    try:
        call(*args, **named)
    except kind as error:
        return error
    raise AssertionError(f"{call} did not raise {kind.__name__}")


def together(*calls: Callable[[], T]) -> list[T]:
    """Make all calls at the same time, each on its own thread; return their results or raise the first
    error."""
    start = threading.Barrier(len(calls))

    def begin(call: Callable[[], T]) -> T:
        start.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(begin, calls))


def meanwhile(change: Callable[[int], object], watch: Callable[[], object]) -> None:
    """Call `change(0)`, `change(1)`, ... while two other threads call `watch`, 100 times each."""

    def keep_watching() -> None:
        for _ in range(100):
            watch()

    with ThreadPoolExecutor(2) as pool:
        watchers = [pool.submit(keep_watching) for _ in range(2)]
        turns = itertools.count()
        while not all(watcher.done() for watcher in watchers):
            change(next(turns))
    for watcher in watchers:
        watcher.result()


def sample(num_bytes: int, seed: int = 0) -> bytes:
    """Return random bytes, the same for the same seed."""
    return random.Random(seed).randbytes(num_bytes)


def cut(data: bytes, part_bytes: int) -> list[tuple[int, bytes]]:
    """Return the parts of `data`, each with its offset."""
    return [(at, data[at : at + part_bytes]) for at in range(0, len(data), part_bytes)]


def write_all(writer: Writer, parts: Sequence[tuple[int, bytes]]) -> None:
    """Write parts in the order given."""
    for offset, part in parts:
        writer.write(offset, part)


def make(store: Store, key: str, data: bytes) -> None:
    """Write an object through `create`, in one part."""
    writer = store.create(key, len(data))
    writer.write(0, data)
    writer.finish()


def read(store: Store, key: str, start: int, stop: int) -> bytes:
    """Return a range of an object."""
    into = bytearray(stop - start)
    store.read(key, start, memoryview(into))
    return bytes(into)


def one_winner(store: Store, key: str, put: Callable[[bytes], object]) -> None:
    """Put an object from six threads at the same time: one succeeds, the others raise `Exists`."""

    def attempt(name: bytes) -> bytes | None:
        try:
            put(name * 1000)
        except Exists:
            return None
        return name

    results = together(*(partial(attempt, bytes([65 + i])) for i in range(6)))
    winners = [name for name in results if name]
    assert len(winners) == 1
    assert store.get(key) == winners[0] * 1000


class StoreTests:
    """Subclass it with a fixture `store` that makes a fresh, empty store."""

    def test_is_a_store_with_writers(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert store.url
        writer = store.create("a", 1)
        assert isinstance(writer, Writer)
        assert writer.block_bytes >= 1
        assert writer.block_bytes & (writer.block_bytes - 1) == 0, "a power of two"
        writer.abort()

    # put and get

    def test_put_then_get(self, store: Store) -> None:
        for num_bytes in (0, 1, 4095, 4096, 4097, 100_000):
            data = sample(num_bytes)
            store.put(f"sizes/{num_bytes}", data)
            assert store.get(f"sizes/{num_bytes}") == data
            assert store.size(f"sizes/{num_bytes}") == num_bytes

    def test_put_takes_any_contiguous_memory(self, store: Store) -> None:
        numbers = array.array("d", [1.5, -2.5, 3.5])
        for data in (bytearray(b"abc"), memoryview(b"xabcx")[1:4], memoryview(numbers)):
            store.put("a", data)
            assert store.get("a") == bytes(data)

    def test_memory_that_is_not_contiguous_is_refused(self, store: Store) -> None:
        raised(UsageError, store.put, "a", memoryview(b"abcdef")[::2])
        assert store.list() == []

    def test_put_keeps_no_hold_of_the_memory(self, store: Store) -> None:
        data = bytearray(b"before")
        store.put("a", data)
        data[:] = b"after!"
        assert store.get("a") == b"before"

    def test_put_replaces(self, store: Store) -> None:
        store.put("a", b"a long first version")
        store.put("a", b"second")
        assert store.get("a") == b"second"
        assert store.size("a") == 6

    def test_put_if_absent_refuses_a_taken_key(self, store: Store) -> None:
        store.put("d/a", b"first", if_absent=True)
        error = raised(Exists, store.put, "d/a", b"second", if_absent=True)
        assert error.key == "d/a"
        assert not error.retryable
        assert store.get("d/a") == b"first"
        assert store.list() == ["d/a"]

    def test_put_if_absent_has_one_winner(self, store: Store) -> None:
        for turn in range(10):
            one_winner(store, f"race/{turn}", partial(store.put, f"race/{turn}", if_absent=True))

    def test_replaced_object_is_seen_old_or_new_never_torn(self, store: Store) -> None:
        versions = [bytes([i]) * (5000 + 1000 * i) for i in range(8)]
        store.put("a", versions[0])

        def watch() -> None:
            assert store.get("a") in versions
            assert store.list() == ["a"]

        meanwhile(lambda turn: store.put("a", versions[turn % 8]), watch)

    def test_replacing_what_was_seen(self, store: Store) -> None:
        store.put("d/a", b"first")
        store.put("d/a", b"second", replacing=b"first")
        assert store.get("d/a") == b"second"
        error = raised(Exists, store.put, "d/a", b"third", replacing=b"first")
        assert error.key == "d/a"
        assert not error.retryable
        assert store.get("d/a") == b"second"
        store.put("d/a", b"", replacing=bytearray(b"second"))
        raised(Exists, store.put, "d/a", b"fourth", replacing=b"second")
        store.put("d/a", b"fourth", replacing=memoryview(b""))
        store.put("d/a", b"fourth", replacing=b"fourth")
        assert store.get("d/a") == b"fourth"
        assert store.list() == ["d/a"]

    def test_replacing_what_is_not_there(self, store: Store) -> None:
        store.put("d/a", b"x")
        for key in ("no", "no/such/key", "d", "d/a/b"):
            for seen in (b"", b"x"):
                error = raised(NotFound, store.put, key, b"y", replacing=seen)
                assert error.key == key
        assert store.list() == ["d/a"]
        assert store.get("d/a") == b"x"

    def test_both_conditions_of_a_put_are_refused(self, store: Store) -> None:
        store.put("a", b"x")
        raised(UsageError, store.put, "a", b"y", if_absent=True, replacing=b"x")
        assert store.get("a") == b"x"

    def test_replacing_has_one_winner(self, store: Store) -> None:
        for turn in range(10):
            key = f"race/{turn}"
            store.put(key, b"seen")
            one_winner(store, key, partial(store.put, key, replacing=b"seen"))
        assert len(store.list()) == 10

    def test_no_replacement_is_lost(self, store: Store) -> None:
        def count_up() -> None:
            for _ in range(10):
                done = False
                while not done:
                    seen = store.get("count")
                    try:
                        store.put("count", str(int(seen) + 1).encode(), replacing=seen)
                        done = True
                    except Exists:
                        pass

        store.put("count", b"0")
        together(*(count_up for _ in range(4)))
        assert store.get("count") == b"40"

    # reading ranges

    def test_read_ranges(self, store: Store) -> None:
        data = sample(10_000)
        store.put("a", data)
        make(store, "b", data)
        for key in ("a", "b"):
            for start, stop in ((0, 10_000), (0, 1), (9_999, 10_000), (4095, 4097), (7, 7)):
                assert read(store, key, start, stop) == data[start:stop]

    def test_open_reads_ranges(self, store: Store) -> None:
        data = sample(10_000)
        make(store, "a", data)
        reader = store.open("a")
        for start, stop in ((9_999, 10_000), (0, 10_000), (4095, 4097), (7, 7)):
            into = bytearray(stop - start)
            reader.read(start, memoryview(into))
            assert into == data[start:stop]
        error = raised(Corrupt, reader.read, 9_999, memoryview(bytearray(2)))
        assert error.key == "a"
        reader.close()
        reader.close()

    def test_open_of_nothing_is_not_found(self, store: Store) -> None:
        def attempt() -> None:
            store.open("a/b").read(0, memoryview(bytearray(1)))

        assert raised(NotFound, attempt).key == "a/b"

    def test_readers_in_several_threads(self, store: Store) -> None:
        data = sample(1 << 20)
        make(store, "a", data)
        reader = store.open("a")

        def attempt(start: int) -> None:
            into = bytearray(1000)
            for at in range(start, 1 << 20, 100_000):
                part = memoryview(into)[: min(1000, (1 << 20) - at)]
                reader.read(at, part)
                assert part == data[at : at + len(part)]

        together(*(partial(attempt, start) for start in range(0, 8000, 1001)))
        reader.close()

    def test_read_into_typed_memory(self, store: Store) -> None:
        numbers = array.array("d", [1.5, -2.5, 3.5])
        store.put("a", memoryview(numbers))
        into = array.array("d", [0.0, 0.0])
        store.read("a", 8, memoryview(into))
        assert into.tolist() == [-2.5, 3.5]

    def test_read_fills_a_part_of_larger_memory(self, store: Store) -> None:
        store.put("a", b"0123456789")
        into = bytearray(b"..........")
        store.read("a", 3, memoryview(into)[2:5])
        assert into == b"..345....."

    def test_read_past_the_end_is_corrupt(self, store: Store) -> None:
        store.put("d/a", b"0123456789")
        for start, stop in ((5, 11), (10, 11), (100, 200)):
            error = raised(Corrupt, read, store, "d/a", start, stop)
            assert (error.key, error.start, error.stop) == ("d/a", start, stop)
            assert str(stop) in str(error.expected)
            assert "10" in str(error.found)

    def test_read_into_wrong_memory_is_refused(self, store: Store) -> None:
        store.put("a", b"0123456789")
        raised(UsageError, store.read, "a", 0, memoryview(b"read-only"))
        raised(UsageError, store.read, "a", -1, memoryview(bytearray(2)))
        raised(UsageError, store.read, "a", 0, memoryview(bytearray(8))[::2])

    def test_what_is_not_there_is_not_found(self, store: Store) -> None:
        store.put("dir/a", b"x")
        for key in ("no", "no/such/key", "dir/b", "dir", "dir/a/b"):
            for call in (store.get, store.size, lambda key: read(store, key, 0, 1)):
                error = raised(NotFound, call, key)
                assert error.key == key
                assert not error.retryable

    # writers

    def test_writer_takes_parts_in_any_order(self, store: Store) -> None:
        unit = writer_unit(store)
        data = sample(5 * unit + 13)
        writer = store.create("a", len(data))
        write_all(writer, cut(data, unit)[::-1])
        writer.finish()
        assert store.get("a") == data
        assert store.size("a") == len(data)

    def test_large_object_from_several_threads(self, store: Store) -> None:
        data = sample((9 << 20) + 13)
        writer = store.create("steps/1/big", len(data))
        parts = cut(data, 64 * writer.block_bytes)
        random.Random(1).shuffle(parts)
        together(*(partial(write_all, writer, parts[i::3]) for i in range(3)))
        writer.finish()
        assert store.size("steps/1/big") == len(data)
        assert read(store, "steps/1/big", 0, len(data)) == data
        assert read(store, "steps/1/big", len(data) - 20, len(data)) == data[-20:]

    def test_writer_keeps_no_hold_of_the_memory(self, store: Store) -> None:
        writer = store.create("a", 6)
        memory = bytearray(b"before")
        writer.write(0, memory)
        memory[:] = b"after!"
        writer.finish()
        assert store.get("a") == b"before"

    def test_a_part_may_come_again(self, store: Store) -> None:
        writer = store.create("a", 6)
        writer.write(0, b"retry!")
        writer.write(0, b"retry!")
        writer.finish()
        assert store.get("a") == b"retry!"

    def test_empty_object(self, store: Store) -> None:
        store.create("a", 0).finish()
        store.put("b", b"")
        assert store.list() == ["a", "b"]
        for key in ("a", "b"):
            assert store.size(key) == 0
            assert store.get(key) == b""
            raised(Corrupt, read, store, key, 0, 1)

    def test_unfinished_object_is_invisible(self, store: Store) -> None:
        writer = store.create("d/a", 3)
        writer.write(0, b"abc")
        assert store.list() == []
        assert store.list("d/") == []
        raised(NotFound, store.get, "d/a")
        raised(NotFound, store.size, "d/a")
        writer.finish()
        assert store.list() == ["d/a"]

    def test_missing_part_is_refused_at_finish(self, store: Store) -> None:
        for missing in range(3):
            unit = writer_unit(store)
            data = sample(2 * unit + 13)
            parts = cut(data, unit)
            writer = store.create("a", len(data))
            write_all(writer, [part for i, part in enumerate(parts) if i != missing])
            error = raised(UsageError, writer.finish)
            assert str(parts[missing][0]) in str(error)
            assert store.list() == []
            write_all(writer, parts[missing : missing + 1])
            writer.finish()
            assert store.get("a") == data
            store.delete("a")

    def test_part_outside_the_object_is_refused(self, store: Store) -> None:
        writer = store.create("a", 10)
        raised(UsageError, writer.write, 0, b"x" * 11)
        raised(UsageError, writer.write, -writer.block_bytes, b"x")
        raised(UsageError, writer.finish)
        writer.abort()
        assert store.list() == []

    def test_part_off_the_blocks_is_refused(self, store: Store) -> None:
        block = writer_unit(store)
        if block == 1:
            return
        writer = store.create("a", 3 * block)
        raised(UsageError, writer.write, 1, b"x" * block)
        raised(UsageError, writer.write, 0, b"x" * (block - 1))
        writer.abort()

    def test_finish_on_a_taken_key(self, store: Store) -> None:
        store.put("a", b"first")
        writer = store.create("a", 6)
        writer.write(0, b"second")
        assert raised(Exists, writer.finish).key == "a"
        writer.abort()
        assert store.get("a") == b"first"
        assert store.list() == ["a"]

    def test_two_writers_of_one_key_have_one_winner(self, store: Store) -> None:
        def attempt(name: bytes) -> bytes | None:
            writer = store.create("d/a", 3)
            writer.write(0, name)
            try:
                writer.finish()
            except Exists:
                writer.abort()
                return None
            return name

        winners = together(partial(attempt, b"one"), partial(attempt, b"two"))
        assert sum(name is not None for name in winners) == 1
        assert store.get("d/a") in winners

    def test_abort_forgets(self, store: Store) -> None:
        writer = store.create("d/a", 3)
        writer.write(0, b"abc")
        writer.abort()
        writer.abort()
        assert store.list() == []
        raised(UsageError, writer.write, 0, b"abc")
        raised(UsageError, writer.finish)
        make(store, "d/a", b"again")
        assert store.get("d/a") == b"again"

    def test_abort_after_finish_changes_nothing(self, store: Store) -> None:
        writer = store.create("a", 3)
        writer.write(0, b"abc")
        writer.finish()
        writer.abort()
        raised(UsageError, writer.write, 0, b"xyz")
        raised(UsageError, writer.finish)
        assert store.get("a") == b"abc"

    # listing and deleting

    def test_list_is_sorted_and_by_text_prefix(self, store: Store) -> None:
        keys = ["b", "a/2", "a/10", "a/b/c", "ab", "a-", "A"]
        for key in keys:
            store.put(key, b"")
        for prefix in ("", "a", "a/", "a/1", "a/b/", "a/b/c", "b"):
            assert store.list(prefix) == sorted(key for key in keys if key.startswith(prefix))

    def test_list_of_what_is_not_there_is_empty(self, store: Store) -> None:
        assert store.list() == []
        assert store.list("no/such/place/") == []
        store.put("a", b"")
        assert store.list("a/") == []
        assert store.list("a/b/") == []

    def test_list_refuses_bad_prefixes(self, store: Store) -> None:
        for prefix in ("/", "/a", "../", "a/../", "a//", "a\0", "a\\"):
            raised(UsageError, store.list, prefix)

    def test_entries_are_the_list_with_lengths(self, store: Store) -> None:
        sizes = {"b": 0, "a/2": 3, "a/10": 70_000, "a/b/c": 1, "ab": 5000, "a-": 2, "A": 4}
        for key, size in sizes.items():
            store.put(key, b"x" * size)
        for prefix in ("", "a", "a/", "a/1", "a/b/", "a/b/c", "b", "no/such/"):
            found = store.entries(prefix)
            assert [one.key for one in found] == store.list(prefix)
            assert all(one.bytes == sizes[one.key] for one in found)
            assert found == [(one.key, one.bytes) for one in found]

    def test_entries_after_every_change(self, store: Store) -> None:
        assert store.entries() == []
        store.put("d/a", b"x")
        store.put("d/a", b"longer")
        writer = store.create("d/b", 5)
        writer.write(0, b"abcde")
        assert store.entries("d/") == [("d/a", 6)]  # what is being written is hidden
        writer.finish()
        assert store.entries("d/") == [("d/a", 6), ("d/b", 5)]
        store.delete("d/a")
        assert store.entries() == [("d/b", 5)]

    def test_entries_refuses_bad_prefixes(self, store: Store) -> None:
        for prefix in ("/", "/a", "../", "a/../", "a//", "a\0", "a\\"):
            raised(UsageError, store.entries, prefix)

    def test_entries_while_others_write_and_delete(self, store: Store) -> None:
        stays = [(f"stays/{i}", i) for i in range(5)]
        for key, size in stays:
            store.put(key, b"x" * size)

        def come_and_go(turn: int) -> None:
            store.put(f"goes/{turn % 3}/a", b"xy")
            store.delete(f"goes/{turn % 3}/a")

        def watch() -> None:
            found = store.entries()
            assert [one for one in found if one.key.startswith("stays/")] == stays
            assert all(one.bytes == 2 for one in found if one.key.startswith("goes/"))

        meanwhile(come_and_go, watch)

    def test_list_while_others_write_and_delete(self, store: Store) -> None:
        stays = [f"stays/{i}" for i in range(5)]
        for key in stays:
            store.put(key, b"x")

        def come_and_go(turn: int) -> None:
            store.put(f"goes/{turn % 3}/a", b"x")
            store.delete(f"goes/{turn % 3}/a")

        def watch() -> None:
            assert [key for key in store.list() if key.startswith("stays/")] == stays

        meanwhile(come_and_go, watch)

    def test_delete(self, store: Store) -> None:
        store.put("d/a", b"x")
        store.put("d/b", b"y")
        store.delete("d/a")
        assert store.list() == ["d/b"]
        raised(NotFound, store.get, "d/a")
        store.delete("d/b")
        assert store.list() == []

    def test_delete_of_what_is_not_there_is_fine(self, store: Store) -> None:
        store.put("d/a", b"x")
        for key in ("no", "no/such/key", "d", "d/a/b"):
            store.delete(key)
        assert store.get("d/a") == b"x"

    def test_many_are_deleted(self, store: Store) -> None:
        for i in range(12):
            store.put(f"d/{i:02}", b"x")
        delete_many(store, [])
        delete_many(store, [f"d/{i:02}" for i in range(10)])
        assert store.list() == ["d/10", "d/11"]

    def test_many_are_deleted_though_some_are_not_there(self, store: Store) -> None:
        for i in range(6):
            store.put(f"d/{i}", b"x")
        delete_many(store, ["no", "d/4", "no/such/key", "d/1", "d/9", "d/0"])
        delete_many(store, ["no"])
        assert store.list() == ["d/2", "d/3", "d/5"]

    def test_many_are_deleted_by_good_keys_only(self, store: Store) -> None:
        for key in BAD_KEYS:
            raised(UsageError, delete_many, store, [key])

    def test_several_prefixes_are_listed(self, store: Store) -> None:
        sizes = {"b": 0, "a/2": 3, "a/10": 70, "a/b/c": 1, "ab": 50, "c/1": 2, "c/d/2": 4, "e/1": 9}
        for key, size in sizes.items():
            store.put(key, b"x" * size)
        for prefixes in (["a/", "c/"], ["a/", "a/b/", "e/"], ["a", "no/"], ["no/", "nor/"], ["c/"]):
            found = keys_below(store, prefixes)
            assert [*found] == sorted(key for key in sizes if key.startswith(tuple(prefixes)))
            assert all(size in (-1, sizes[key]) for key, size in found.items())

    def test_several_prefixes_after_every_change(self, store: Store) -> None:
        assert keys_below(store, ["d/", "e/"]) == {}
        store.put("e/a", b"x")
        writer = store.create("d/b", 5)
        writer.write(0, b"abcde")
        assert [*keys_below(store, ["e/", "d/"])] == ["e/a"]  # what is being written is hidden
        writer.finish()
        store.put("f", b"")
        assert [*keys_below(store, ["e/", "d/"])] == ["d/b", "e/a"]
        store.delete("e/a")
        assert [*keys_below(store, ["e/", "d/"])] == ["d/b"]

    def test_key_made_again_has_the_new_bytes(self, store: Store) -> None:
        for turn in range(5):
            data = bytes([turn]) * 100
            make(store, "d/a", data)
            assert read(store, "d/a", 0, 100) == data
            store.delete("d/a")
            raised(NotFound, read, store, "d/a", 0, 100)

    def test_making_and_deleting_in_one_place_do_not_disturb(self, store: Store) -> None:
        def come_and_go(name: str) -> None:
            for _ in range(25):
                store.put(f"deep/place/{name}", b"x")
                assert store.get(f"deep/place/{name}") == b"x"
                store.delete(f"deep/place/{name}")
                make(store, f"deep/place/{name}", b"yy")
                assert store.size(f"deep/place/{name}") == 2
                store.delete(f"deep/place/{name}")

        together(*(partial(come_and_go, name) for name in "abc"))
        assert store.list() == []

    # keys

    def test_bad_keys_are_refused_everywhere(self, store: Store) -> None:
        for key in BAD_KEYS:
            raised(UsageError, store.put, key, b"x")
            raised(UsageError, store.create, key, 1)
            raised(UsageError, store.get, key)
            raised(UsageError, read, store, key, 0, 1)
            raised(UsageError, store.size, key)
            raised(UsageError, store.delete, key)
        assert store.list() == []

    def test_unusual_keys_are_kept(self, store: Store) -> None:
        keys = [
            "...",
            "a b",
            "a/.hidden",
            "é/ü",
            "x" * 200,
            "%2e%2e",
            "a:b*?",
            "/".join("deep" * 9),
        ]
        for key in keys:
            store.put(key, key.encode())
        assert store.list() == sorted(keys)
        for key in keys:
            assert store.get(key) == key.encode()

    def test_negative_size_is_refused(self, store: Store) -> None:
        raised(UsageError, store.create, "a", -1)


def writer_unit(store: Store) -> int:
    """Return the alignment of parts in a store."""
    writer = store.create("unit", 0)
    writer.abort()
    return writer.block_bytes
