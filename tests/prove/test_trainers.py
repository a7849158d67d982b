"""What docs/proved.md shows of trainers is what `holdfast prove` says of them here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from docs.commands import ROOT, Command, commands_of, matches, shape
from docs.test_docs import blocks

PAGE = ROOT / "docs" / "proved.md"
LIMIT_S = 1500
COMMANDS = [
    command
    for block in blocks(PAGE, "console")
    for command in commands_of(block.text, block.options, f"{PAGE.name}:{block.line}")
]


def name_of(command: Command) -> str:
    """`accelerate-own`"""
    found = re.search(r"train_(\w+)\.py .*--with (\w+)", command.text)
    assert found is not None, command.where
    return f"{found[1]}-{found[2]}"


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "docs")
    return import_module("make_proved")


def test_the_page_is_made_of_the_records(pages: Any, tmp_path: Path) -> None:
    """Each trainer has both commands there, with what they said."""
    pages.write(tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == PAGE.read_text()
    expected = [f"{trainer.name}-{form}" for trainer in pages.TRAINERS for form in pages.FORMS]
    assert list(map(name_of, COMMANDS)) == expected


def test_with_holdfast_all_go_on_exactly_but_dcps_own_calls() -> None:
    """Which save what they are given, as the page says."""
    differing = [name_of(c) for c in COMMANDS if c.exit and c.text.endswith("holdfast")]
    assert differing == ["dcp-holdfast"]


@pytest.mark.soak
@pytest.mark.distributed
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("command", [pytest.param(c, id=name_of(c)) for c in COMMANDS])
def test_it_is_said_again(command: Command, tmp_path: Path) -> None:
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", command.text],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == command.exit, done.stdout + done.stderr
    assert matches(shape(command.output), shape(done.stdout.splitlines())), done.stdout
