"""Before a call begins, all ranks have come to it: two ranks that try otherwise."""

from __future__ import annotations

import pytest

from core.group.meetings import CASES
from system.distributed.cases import Case, check, run_module

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("meetings")
    return run_module("core.group.meetings", 2, folder)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_meetings(failed: dict[str, list[str]], case: Case) -> None:
    check(failed, case.__name__)
