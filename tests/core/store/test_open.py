"""`open_store`: which store a path or URL means."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.errors import UsageError
from holdfast.store import LocalStore, MemoryStore, open_store, register


@pytest.mark.parametrize("name", ["run", "with space", "50%25", "a?b#c", "é"])
def test_a_store_opens_again_by_its_url(tmp_path: Path, name: str) -> None:
    store = open_store(tmp_path / name)
    store.put("a", b"x")
    assert open_store(store.url).get("a") == b"x"
    assert (tmp_path / name / "a").read_bytes() == b"x"


def test_relative_paths_are_fixed_when_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("run")
    monkeypatch.chdir("/")
    assert isinstance(store, LocalStore)
    assert store.root == os.path.join(tmp_path, "run")


@pytest.mark.parametrize("url", ["file:///tmp/x", "file://localhost/tmp/x", "/tmp/x", "/tmp//x/"])
def test_forms_of_a_local_path(url: str) -> None:
    store = open_store(url)
    assert isinstance(store, LocalStore)
    assert store.root == "/tmp/x"


def test_opening_touches_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path / "run")
    assert store.list() == []
    assert not (tmp_path / "run").exists()


def test_memory() -> None:
    store = open_store("memory://some/name")
    assert isinstance(store, MemoryStore)
    assert store.url == "memory://some/name"


def test_a_scheme_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.store._registered", {})
    register("tape", lambda url: MemoryStore(url.partition("://")[2]))
    open_store("tape://reel").put("a", b"x")
    assert MemoryStore("reel").get("a") == b"x"
    with pytest.raises(UsageError, match="tape://"):
        open_store("tapes://reel")


@pytest.mark.parametrize("scheme", ["s3", "file", "S 3", "a://b", 3])
def test_a_scheme_that_cannot_be_registered(scheme: str) -> None:
    with pytest.raises(UsageError, match="register"):
        register(scheme, MemoryStore)


def test_a_package_brings_a_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tapes-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: tapes\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[holdfast.stores]\nreel = tapes:Tape\n")
    (tmp_path / "tapes.py").write_text("from holdfast.store import MemoryStore as Tape\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("holdfast.store._registered", {})
    assert isinstance(open_store("reel://one"), MemoryStore)


def test_unknown_scheme_names_the_near_one() -> None:
    with pytest.raises(UsageError, match=r"unknown scheme 'flie'(.|\n)*did you mean 'file'"):
        open_store("flie:///tmp/x")
    with pytest.raises(UsageError, match=r"unknown scheme 'https'") as e:
        open_store("https://example.org")
    assert e.value.hint is None


@pytest.mark.parametrize("url", ["", "file://host/path", "file://", "memory://"])
def test_urls_that_name_no_store(url: str) -> None:
    with pytest.raises(UsageError):
        open_store(url)
