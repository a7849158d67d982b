"""How much is read to tell that a root is holdfast's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from holdfast.formats.read.detect import detect


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that were listed."""
    found, scandir = list[str](), os.scandir

    def listing(path: Any = ".") -> Any:
        found.append(os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", listing)
    return found


def test_a_root_is_known_by_its_first_step(tmp_path: Path, listed: list[str]) -> None:
    """A large one has hundreds of steps with thousands of files."""
    for step in range(1, 6):
        attempt = tmp_path / f"steps/{step:010d}/0001-000001"
        attempt.mkdir(parents=True)
        (attempt.parent / "manifest.json").touch()
    (tmp_path / "pytorch_model.bin").touch()
    assert detect(tmp_path) is None
    assert listed == [f"{tmp_path}/steps"]


def test_steps_that_are_not_committed_are_none(tmp_path: Path) -> None:
    (tmp_path / "steps/0000000001/0001-000001").mkdir(parents=True)
    (tmp_path / "pytorch_model.bin").touch()
    assert detect(tmp_path) == "torch"


def test_steps_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens a step of them needs no list."""
    (tmp_path / "steps").mkdir()
    scandir = os.scandir

    def refused(path: Any = ".") -> Any:
        if os.fspath(path).endswith("steps"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    assert detect(tmp_path) is None
