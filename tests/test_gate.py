"""The table of what `make test` runs is true, and is checked in every run."""

from __future__ import annotations

from pathlib import Path

import pytest

import gate


def test_every_file_is_there() -> None:
    named = [*gate.KEPT, *gate.FIRST]
    assert [file for file in named if not (gate.TESTS / file).is_file()] == []


def test_a_pattern_that_keeps_nothing_ends_the_run(
    pytestconfig: pytest.Config, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Path(__file__).name
    monkeypatch.setitem(gate.KEPT, own, (r"test_every.*", r"test_that_was_renamed\[a\]"))
    monkeypatch.setattr(pytestconfig, "args", [own])
    mine = [item for item in request.session.items if item.path.name == own]
    with pytest.raises(pytest.UsageError, match=r"not there: test_gate.py: test_that_was_renamed"):
        gate.leave_to_the_soak(pytestconfig, mine)
