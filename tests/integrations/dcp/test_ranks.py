"""DCP's own calls with holdfast's Writer and Reader, on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.store.objects.fixtures import credentials, fresh, seaweed  # noqa: F401
from core.store.objects.servers import SeaweedFS
from integrations.dcp.cases import CASES
from system.distributed.cases import Case, check, run_module

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    names = [case.__name__ for case in CASES]
    return run_module("integrations.dcp.cases", 2, tmp_path_factory.mktemp("dcp"), *names)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_ranks(failed: dict[str, list[str]], case: Case) -> None:
    check(failed, case.__name__)


@pytest.mark.soak
def test_in_another_process(tmp_path: Path) -> None:
    check(
        run_module("integrations.dcp.cases", 2, tmp_path, "in_another_process", forked=False),
        "in_another_process",
    )


@pytest.mark.soak
def test_on_object_storage(tmp_path: Path, seaweed: SeaweedFS, credentials: None) -> None:  # noqa: F811
    (tmp_path / "url.json").write_text(json.dumps(seaweed.url(fresh())))
    check(
        run_module("integrations.dcp.cases", 2, tmp_path, "on_object_storage", forked=False),
        "on_object_storage",
    )
