"""The methods of an attached engine take and return what DeepSpeed's do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is imported
pytest.importorskip("deepspeed")

from .forked import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    log = tmp_path_factory.mktemp("ranks") / "log"
    with Ranks("trainers.deepspeed_attached", log, is_group_of_one=True) as found:
        yield found


@pytest.mark.parametrize(
    "case", ["tags", "parts", "elsewhere", "deepspeeds_own", "frozen", "refused"]
)
def test_attached(ranks: Ranks, tmp_path: Path, case: str) -> None:
    ranks.finish({"case": case, "root": str(tmp_path / "root")}, 1)
