"""Values of optimizers that are another on each rank, on two ranks."""

from __future__ import annotations

import pytest

from .cases import Case, check, run_module
from .own_values_cases import CASES

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_module("own_values_cases", 2, tmp_path_factory.mktemp("own_values"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_values_of_each_rank(failed: dict[str, list[str]], case: Case) -> None:
    check(failed, case.__name__)
