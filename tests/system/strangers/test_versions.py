"""The documentation's table of versions says what the tests run with."""

from __future__ import annotations

from importlib import import_module, metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parents[3]


def test_the_table_of_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    table = {name: version for name, (version, _) in import_module("make_versions").TESTED.items()}
    assert {name: metadata.version(name).partition("+")[0] for name in table} == table
