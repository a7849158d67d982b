"""A view reads as the store behind it does, and cannot be written to."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.core.store.views import PartReader, ViewStore
from holdfast.errors import UsageError
from holdfast.store import MemoryStore, Reader, Store


class Tails(ViewStore):
    """The objects of a store without their first bytes."""

    url = "memory://tails"
    shows = "a tail"

    def __init__(self, inner: Store, skip: int) -> None:
        self.inner = inner
        self.skip = skip

    def open(self, key: str) -> Reader:
        return PartReader(self.inner.open(key), self.skip)

    def size(self, key: str) -> int:
        return self.inner.size(key) - self.skip


@pytest.fixture
def tails() -> Tails:
    store = MemoryStore("views")
    store.put("a/b", b"0123456789")
    return Tails(store, 3)


def test_a_view_that_lists_has_entries() -> None:
    class Listed(Tails):
        def list(self, prefix: str = "") -> list[str]:
            return self.inner.list(prefix)

    inner = MemoryStore("listed views")
    inner.put("a/b", b"0123456789")
    assert Listed(inner, 3).entries("a/") == [("a/b", 7)]
    assert Tails(inner, 3).entries() == []


def test_reading(tails: Tails) -> None:
    assert isinstance(tails, Store)
    assert tails.get("a/b") == b"3456789"
    into = bytearray(2)
    tails.read("a/b", 4, memoryview(into))
    assert into == b"78"


@pytest.mark.parametrize(
    "write",
    [
        lambda store: store.put("a/c", b""),
        lambda store: store.create("a/c", 1),
        lambda store: store.delete("a/b"),
    ],
)
def test_writing_is_refused(tails: Tails, write: Callable[[Store], None]) -> None:
    with pytest.raises(UsageError, match="memory://tails is a tail: holdfast only reads it"):
        write(tails)
    assert tails.inner.get("a/b") == b"0123456789"
