"""The pages of the site, with those that are made from the code."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="session")
def make_site() -> Any:
    """The module that puts the site together."""
    sys.path.insert(0, str(DOCS))
    try:
        return import_module("make_site")
    finally:
        sys.path.remove(str(DOCS))


@pytest.fixture(scope="session")
def site(make_site: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "docs"
    make_site.assemble(folder)
    return folder
