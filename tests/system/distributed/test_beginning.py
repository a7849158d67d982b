"""What one of two ranks alone has done since a restore is judged by both alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from .beginning_cases import CASES
from .cases import Case, check, run_module

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    out: Path = tmp_path_factory.mktemp("beginning")
    return run_module("beginning_cases", 2, out)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_beginning(failed: dict[str, list[str]], case: Case) -> None:
    check(failed, case.__name__)
