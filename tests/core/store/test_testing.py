"""The wrappers of `holdfast.testing`: each is a right store, and adds what it says."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time

import pytest

from holdfast.errors import NotFound, Unavailable
from holdfast.store import MemoryStore, Store, delete_many, keys_below
from holdfast.testing import Counting, Faulty, Operation, Slow, StopAfter, Stopped, StoreTests
from holdfast.testing.stores import make, raised, read, together

names = (f"wrapped-{i}" for i in itertools.count())


@pytest.fixture
def inner() -> MemoryStore:
    return MemoryStore(next(names))


class TestWrappers(StoreTests):
    @pytest.fixture(params=["stop", "faulty", "slow", "counting"])
    def store(self, request: pytest.FixtureRequest, inner: Store) -> Store:
        wrapped: dict[str, Store] = {
            "stop": StopAfter(inner, None),
            "faulty": Faulty(inner, lambda op, key: None),
            "slow": Slow(inner, 0.0),
            "counting": Counting(inner),
        }
        return wrapped[request.param]


SCRIPT = [
    Operation("put", "a", 1),
    Operation("create", "b"),
    Operation("write", "b", 3),
    Operation("finish", "b"),
    Operation("delete", "a"),
]
STATES: list[dict[str, bytes]] = [
    {},
    {"a": b"x"},
    {"a": b"x"},
    {"a": b"x"},
    {"a": b"x", "b": b"abc"},
    {"b": b"abc"},
]


def run(store: Store) -> None:
    store.put("a", b"x")
    store.get("a")
    writer = store.create("b", 3)
    try:
        writer.write(0, b"abc")
        writer.finish()
    except BaseException:
        writer.abort()
        raise
    store.delete("a")


def contents(store: Store) -> dict[str, bytes]:
    return {key: store.get(key) for key in store.list()}


def test_store_that_never_stops_tells_what_was_done(inner: Store) -> None:
    store = StopAfter(inner, None)
    run(store)
    assert store.operations == SCRIPT
    assert contents(inner) == STATES[-1]


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("n", range(1, len(SCRIPT) + 1))
def test_stop_at_every_operation(inner: Store, n: int, torn: bool) -> None:
    store = StopAfter(inner, n, torn=torn)
    raised(Stopped, run, store)
    done = n if torn else n - 1
    assert store.operations == SCRIPT[:done]
    assert contents(inner) == STATES[done]
    for call in (store.list, lambda: store.get("a"), lambda: store.put("c", b"")):
        raised(Stopped, call)
    assert contents(inner) == STATES[done]
    assert store.operations == SCRIPT[:done]


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_dead_have_deleted_some_of_many(inner: Store, n: int, torn: bool) -> None:
    for key in "abc":
        inner.put(key, b"x")
    raised(Stopped, delete_many, StopAfter(inner, n, torn=torn), list("abc"))
    assert inner.list() == list("abc")[n if torn else n - 1 :]


def test_stop_beyond_the_end_is_never_reached(inner: Store) -> None:
    run(StopAfter(inner, len(SCRIPT) + 1))
    assert contents(inner) == STATES[-1]


def test_the_dead_do_not_abort(inner: Store) -> None:
    store = StopAfter(inner, 3)
    writer = store.create("a", 3)
    writer.write(0, b"abc")
    raised(Stopped, writer.finish)
    raised(Stopped, writer.abort)


def test_stopped_is_not_handled_as_an_error() -> None:
    assert not issubclass(Stopped, Exception)


def test_only_n_minus_one_of_many_threads_get_through(inner: Store) -> None:
    store = StopAfter(inner, 5)

    def attempt(i: int) -> bool:
        try:
            store.put(str(i), b"x")
        except Stopped:
            return False
        return True

    results = together(*(lambda i=i: attempt(i) for i in range(12)))
    assert sum(results) == len(inner.list()) == len(store.operations) == 4


def test_faulty_raises_what_it_is_told(inner: Store) -> None:
    asked: list[tuple[str, str]] = []

    def fail(op: str, key: str) -> Exception | None:
        asked.append((op, key))
        return Unavailable(f"I/O error in {op}", key=key) if op == "finish" else None

    store = Faulty(inner, fail)
    error = raised(Unavailable, run, store)
    assert error.key == "b"
    assert contents(inner) == {"a": b"x"}
    assert asked == [
        ("put", "a"),
        ("get", "a"),
        ("create", "b"),
        ("write", "b"),
        ("finish", "b"),
        ("abort", "b"),
    ]


def test_faulty_covers_every_operation(inner: Store) -> None:
    make(inner, "a", b"x")
    store = Faulty(inner, lambda op, key: Unavailable(op))
    calls = {
        "put": lambda: store.put("a", b"y"),
        "create": lambda: store.create("b", 1),
        "get": lambda: store.get("a"),
        "read": lambda: read(store, "a", 0, 1),
        "size": lambda: store.size("a"),
        "list": lambda: store.list("a"),
        "delete": lambda: store.delete("a"),
    }
    for op, call in calls.items():
        assert raised(Unavailable, call).message == op
    assert contents(inner) == {"a": b"x"}


def test_slow_waits_before_each_call(inner: Store) -> None:
    started = time.perf_counter()
    run(Slow(inner, 0.01))
    assert time.perf_counter() - started >= 6 * 0.01


def test_counting(inner: Store) -> None:
    store = Counting(inner)
    run(store)
    read(store, "b", 1, 3)
    raised(NotFound, store.get, "no")
    assert store.calls == {
        "put": 1,
        "get": 2,
        "create": 1,
        "write": 1,
        "finish": 1,
        "delete": 1,
        "read": 1,
    }
    assert store.bytes_written == 1 + 3
    assert store.bytes_read == 1 + 2


def test_many_at_a_time_are_one_call(inner: Store) -> None:
    for key in ("a/1", "b/2", "c/3"):
        inner.put(key, b"x")
    store = Counting(inner)
    delete_many(store, ["a/1", "no"])
    assert keys_below(store, ["b/", "a/"]) == {"b/2": 1}
    assert store.calls == {"delete_many": 1, "entries_many": 1}


def test_many_at_a_time_fail_one_by_one(inner: Store) -> None:
    for key in "abc":
        inner.put(key, b"x")
    store = Faulty(inner, lambda op, key: Unavailable(op) if key == "b" else None)
    assert raised(Unavailable, delete_many, store, list("abc")).message == "delete"
    assert inner.list() == ["b", "c"]


def test_counting_from_several_threads(inner: Store) -> None:
    store = Counting(inner)

    def work() -> None:
        for i in range(200):
            store.put(str(i), b"xyz")

    together(*[work] * 4)
    assert store.calls["put"] == 800
    assert store.bytes_written == 2400


def test_wrappers_nest(inner: Store) -> None:
    counting = Counting(inner)
    store = StopAfter(counting, 2)
    store.put("a", b"x")
    raised(Stopped, store.put, "b", b"y")
    assert counting.calls == {"put": 1}
    assert store.url == inner.url


def test_holdfast_testing_needs_no_pytest() -> None:
    code = "import sys, holdfast.testing; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class BrokenStore(MemoryStore):
    """A store with a bug that the suite must find."""

    def read(self, key: str, offset: int, into: memoryview) -> None:
        data = self.get(key)[offset : offset + into.nbytes]
        into.cast("B")[: len(data)] = data


def test_the_suite_finds_a_bug(inner: MemoryStore) -> None:
    store = BrokenStore(inner.name)
    raised(AssertionError, StoreTests().test_read_past_the_end_is_corrupt, store)
    StoreTests().test_read_ranges(store)
