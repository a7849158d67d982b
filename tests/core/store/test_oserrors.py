"""Odd paths: what stands in the way is named, by every public call that is given such a path."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from cli.calling import call
from holdfast.core.store.oserrors import obstacle
from holdfast.errors import HoldfastError, NotFound, StoreError, Unavailable, UsageError
from holdfast.store import LocalStore
from holdfast.testing.stores import raised


def state() -> dict[str, Any]:
    return {"data": {"x": torch.zeros(2)}}


CALLS: dict[str, Callable[[str], object]] = {
    "save": lambda path: holdfast.save(path, state(), step=1),
    "load": lambda path: holdfast.load(path, state()),
    "open": holdfast.open,
    "steps": holdfast.steps,
    "Checkpointer": lambda path: holdfast.Checkpointer(path, state()).close(),
}


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A folder of odd things."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to("/no/such/volume")
    (tmp_path / "loop").symlink_to("pool")
    (tmp_path / "pool").symlink_to("loop")
    (tmp_path / "through").symlink_to("file/below")
    return tmp_path


WHAT = {
    "file/below": "{}/file' is a file, not a folder",
    "dangling": "{}/dangling' is a link to '/no/such/volume', which is not there",
    "dangling/run": "{}/dangling' is a link to '/no/such/volume', which is not there",
    "loop": "{}/loop' is a link to 'pool', which leads back to it",
    "loop/run": "{}/loop' is a link to 'pool', which leads back to it",
    "through": "{}/through' is a link to 'file/below', which is not there",
    "x" * 300: "the name 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...' has 300 bytes",
    "a/" + "é" * 200: "has 400 bytes",
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("path", WHAT)
def test_what_is_in_the_way_is_named(odd: Path, path: str, name: str) -> None:
    error = raised(HoldfastError, CALLS[name], str(odd / path))
    assert WHAT[path].format(odd) in str(error)
    assert "EBUSY" not in str(error) and error.hint
    assert isinstance(error, (StoreError, UsageError)) and not isinstance(error, Unavailable)


@pytest.mark.parametrize("path", WHAT)
def test_the_command_line_names_it_too(odd: Path, path: str) -> None:
    for verb in ("ls", "verify"):
        code, _, errors = call(verb, odd / path)
        assert code == 1 and WHAT[path].format(odd) in errors


def test_a_file_in_place_of_the_root(odd: Path) -> None:
    for name in ("save", "Checkpointer"):
        error = raised(StoreError, CALLS[name], str(odd / "file"))
        assert f"'{odd}/file' is a file, not a folder (ENOTDIR)" in str(error)
    for name in ("load", "open", "steps"):
        assert "is a file of no format" in str(raised(NotFound, CALLS[name], str(odd / "file")))


def test_a_path_that_is_too_long_is_not_printed_whole(tmp_path: Path) -> None:
    path = os.path.join(tmp_path, *["deep"] * 2000)
    for do in CALLS.values():
        error = raised(HoldfastError, do, path)
        assert "bytes, more than 4096" in str(error) and len(str(error)) < 1200


def test_what_is_only_missing_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    for path in ("none", "none/below", "link", "link/none"):
        assert obstacle(str(tmp_path / path)) is None
    for path in ("none", "none/below", "link/none"):
        with pytest.raises(NotFound, match="no root at"):
            holdfast.steps(tmp_path / path)
    assert holdfast.steps(tmp_path / "link") == []
    holdfast.save(tmp_path / "link" / "run", state(), step=1)
    assert holdfast.steps(tmp_path / "run") == [1]
    assert obstacle("/") is None


def test_where_no_folder_can_be_made() -> None:
    error = raised(Unavailable, LocalStore("/proc/none/run").put, "a/b", b"x")
    assert "'/proc/none' cannot be made" in str(error)


@pytest.fixture
def unprivileged() -> Iterator[None]:
    """Nobody may do everything, as root may."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_that_may_not_be_looked_into(tmp_path: Path, request: Any) -> None:
    closed = tmp_path / "closed"
    holdfast.save(closed / "run", state(), step=1)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.name.startswith(("pytest-", "popen-", "test_")):
            folder.chmod(0o755)
    closed.chmod(0o600 if os.geteuid() else 0o700)
    request.getfixturevalue("unprivileged")
    for name in ("load", "open", "steps"):
        error = raised(StoreError, CALLS[name], str(closed / "run"))
        assert f"this user may not look into '{closed}' (EACCES)" in str(error)
        assert "x of the folder" in str(error.hint)


def test_a_link_inside_a_root(tmp_path: Path) -> None:
    """An image that was moved to a volume which is not there."""
    holdfast.save(tmp_path, state(), step=1)
    (image,) = tmp_path.glob("steps/*/*/*.safetensors")
    image.rename(tmp_path / "elsewhere")
    image.symlink_to("/no/such/volume/image")
    error = raised(NotFound, holdfast.load, tmp_path, state())
    assert f"'{image}' is a link to '/no/such/volume/image', which is not there" in str(error)


def test_a_relative_path_with_a_colon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for do in CALLS.values():
        assert "write './runs:a/x'" in str(raised(UsageError, do, "runs:a/x").hint)
    assert "did you mean 'dcp'?; for a path" in str(raised(UsageError, holdfast.open, "dpc:x").hint)
    assert "write 's3://x'" in str(raised(UsageError, holdfast.open, "s3:/x").hint)
    for name in ("save", "Checkpointer"):
        assert "write './torch:new'" in str(raised(UsageError, CALLS[name], "torch:new").hint)
    holdfast.save("./runs:a/x", state(), step=1)
    assert holdfast.steps("./runs:a/x") == holdfast.steps(tmp_path / "runs:a" / "x") == [1]


def test_errors_that_only_the_system_knows_keep_its_words(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("d/a", b"x")
    error = raised(StoreError, store.put, "d", b"y")
    assert os.strerror(errno.EISDIR) in str(error) and "directory of other keys" in str(error)
