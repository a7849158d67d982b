"""Roots that lead each of two ranks elsewhere are refused before anything is done with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from .cases import Case, check, run_module
from .roots_cases import CASES

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    out: Path = tmp_path_factory.mktemp("roots")
    return run_module("roots_cases", 2, out)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_roots(failed: dict[str, list[str]], case: Case) -> None:
    check(failed, case.__name__)
