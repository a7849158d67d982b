"""Readers that stay open: none too many, none too long, and none that is stale."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.checkpoint import files
from holdfast.core.checkpoint.files import OpenReaders
from holdfast.errors import NotFound, Unavailable
from holdfast.store import LocalStore, MemoryStore
from holdfast.testing import Counting, Faulty


def read(some: OpenReaders, key: str, size: int = 3) -> bytes:
    into = bytearray(size)
    some.read(key, 0, memoryview(into))
    return bytes(into)


def open_files(root: Path) -> int:
    links = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
    return sum(os.path.islink(p) and os.readlink(p).startswith(str(root)) for p in links)


def filled(root: Path, count: int) -> LocalStore:
    store = LocalStore(root)
    for i in range(count):
        store.put(f"k{i}", b"%03d" % i)
    return store


def test_opened_once_while_kept(tmp_path: Path) -> None:
    store = Counting(filled(tmp_path, 1))
    some = OpenReaders(store)
    with some.kept():
        assert [read(some, "k0") for _ in range(5)] == [b"000"] * 5
        assert store.calls["open"] == 1 and open_files(tmp_path) == 1
    assert open_files(tmp_path) == 0


def test_closed_at_once_otherwise(tmp_path: Path) -> None:
    some = OpenReaders(filled(tmp_path, 1))
    assert read(some, "k0") == b"000"
    assert open_files(tmp_path) == 0


def test_no_more_than_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_OPEN", 4)
    some = OpenReaders(filled(tmp_path, 20))
    with some.kept():
        for i in range(20):
            assert read(some, f"k{i}") == b"%03d" % i
            assert open_files(tmp_path) <= 4
    assert open_files(tmp_path) == 0


def test_an_object_that_is_gone(tmp_path: Path) -> None:
    some = OpenReaders(LocalStore(tmp_path))
    with some.kept(), pytest.raises(NotFound):
        read(some, "k0")


def test_a_reader_that_became_stale_is_opened_anew() -> None:
    """A file that was replaced by another host: NFS says ESTALE to whoever has it open."""
    inner = MemoryStore("stale")
    inner.put("k", b"abc")
    stale: list[bool] = []
    store = Faulty(inner, lambda op, _: stale.pop() and Unavailable("ESTALE") if stale else None)
    some = OpenReaders(store)
    with some.kept():
        assert read(some, "k") == b"abc"
        inner.put("k", b"new")
        stale.append(True)
        assert read(some, "k") == b"new"
        inner.delete("k")
        stale.append(True)
        with pytest.raises(NotFound):
            read(some, "k")


def test_a_store_that_stays_away_is_reported() -> None:
    inner = MemoryStore("away")
    inner.put("k", b"abc")
    away: list[bool] = []
    some = OpenReaders(Faulty(inner, lambda op, _: Unavailable("EIO") if away else None))
    with some.kept():
        read(some, "k")
        away.append(True)
        with pytest.raises(Unavailable):
            read(some, "k")


def test_too_many_open_files_closes_idle_ones(tmp_path: Path) -> None:
    inner = Counting(filled(tmp_path, 6))

    def fail(op: str, key: str) -> Exception | None:
        return Unavailable("EMFILE") if op == "open" and open_files(tmp_path) >= 3 else None

    some = OpenReaders(Faulty(inner, fail))
    with some.kept():
        for i in range(6):
            assert read(some, f"k{i}") == b"%03d" % i
