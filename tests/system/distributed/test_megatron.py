"""Checkpoints of a real Megatron-Core GPT, saved by four ranks in several arrangements."""

from __future__ import annotations

from pathlib import Path

import pytest

from soaking import cases_of

from .cases import Case, check, run_module

pytest.importorskip("megatron.core", reason="megatron-core makes the checkpoints that are read")

from . import megatron_live_cases, megatron_readers, megatron_sources

pytestmark = pytest.mark.distributed


def names_of(cases: list[Case]) -> list[str]:
    return [case.__name__ for case in cases]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron")


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, out: Path) -> dict[str, list[str]]:
    names = cases_of(request, "test_sources", names_of(megatron_sources.CASES))
    return run_module("megatron_sources", 4, out, *names)


@pytest.fixture(scope="module")
def read(
    request: pytest.FixtureRequest, out: Path, saved: dict[str, list[str]]
) -> dict[str, list[str]]:
    names = cases_of(request, "test_as_megatron_loads", names_of(megatron_readers.CASES))
    return run_module("megatron_readers", 1, out, *names)


@pytest.mark.soak
@pytest.mark.parametrize("case", megatron_sources.CASES, ids=lambda case: case.__name__)
def test_sources(saved: dict[str, list[str]], case: Case) -> None:
    check(saved, case.__name__)


@pytest.mark.soak
@pytest.mark.parametrize("case", megatron_readers.CASES, ids=lambda case: case.__name__)
def test_as_megatron_loads(read: dict[str, list[str]], case: Case) -> None:
    check(read, case.__name__)


@pytest.fixture(scope="module")
def live(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    names = cases_of(request, "test_live", names_of(megatron_live_cases.CASES))
    out = tmp_path_factory.mktemp("live")
    return run_module("megatron_live_cases", 4, out, *names, timeout_s=1700)


@pytest.mark.soak_except(
    "save_bf16_tp2_zero",
    "resume_bf16_tp2_zero_as_tp2_zero",
    "another_model_is_refused",
    "what_modules_say_besides_is_refused",
)
@pytest.mark.timeout(1800)  # all cases are one launch
@pytest.mark.parametrize("case", megatron_live_cases.CASES, ids=lambda case: case.__name__)
def test_live(live: dict[str, list[str]], case: Case) -> None:
    check(live, case.__name__)
