"""Meshes made by hand over some of the ranks, and ranks that hold other values, on four ranks."""

from __future__ import annotations

import pytest

from .cases import Case, check, run_module
from .meshes_cases import CASES

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_module("meshes_cases", 4, tmp_path_factory.mktemp("meshes"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_meshes(failed: dict[str, list[str]], case: Case) -> None:
    check(failed, case.__name__)
