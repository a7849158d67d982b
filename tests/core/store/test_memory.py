"""The memory store, by the suite, and what is special to it."""

from __future__ import annotations

import itertools

import pytest

from holdfast.errors import UsageError
from holdfast.store import MemoryStore, Store, open_store
from holdfast.testing import StoreTests

names = (f"test-{i}" for i in itertools.count())


class TestMemoryStore(StoreTests):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore(next(names))


def test_one_name_is_one_store() -> None:
    name = next(names)
    MemoryStore(name).put("a", b"x")
    assert open_store(f"memory://{name}").get("a") == b"x"
    assert MemoryStore(next(names)).list() == []


def test_a_store_needs_a_name() -> None:
    with pytest.raises(UsageError, match="needs a name"):
        MemoryStore("")


def test_a_part_that_comes_again_takes_the_place_of_the_first() -> None:
    store = MemoryStore(next(names))
    writer = store.create("a", 6)
    writer.write(0, b"failed")
    writer.write(0, b"retry!")
    writer.finish()
    assert store.get("a") == b"retry!"
