"""Megatron-Core saves and loads by holdfast, on two ranks and from two to one."""

from __future__ import annotations

import pytest

from integrations.dcp.megatron_cases import CASES
from system.distributed.cases import Case, check, run_module

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.distributed, pytest.mark.soak]


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_module(
        "integrations.dcp.megatron_cases", 2, tmp_path_factory.mktemp("megatron"), forked=False
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_ranks(failed: dict[str, list[str]], case: Case) -> None:
    check(failed, case.__name__)
