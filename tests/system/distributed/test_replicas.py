"""Replicas that differ on two ranks: at the first save, and later."""

from __future__ import annotations

from pathlib import Path

import pytest

from .cases import Case, check, run_module
from .replicas_cases import CASES

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    out: Path = tmp_path_factory.mktemp("replicas")
    return run_module("replicas_cases", 2, out)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_replicas(failed: dict[str, list[str]], case: Case) -> None:
    check(failed, case.__name__)
