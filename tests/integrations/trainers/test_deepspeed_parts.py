"""DeepSpeed's experts and pipelines: saved on two ranks, loaded on one and two."""

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
    with Ranks("integrations.trainers.deepspeed_parts", log, is_group_of_one=True) as found:
        yield found


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (1, "bf16"), (2, "bf16")])
def test_experts(ranks: Ranks, tmp_path: Path, stage: int, dtype: str) -> None:
    """Names are global: what two ranks have halves of, one rank has whole, and so have both of two."""
    given = {"kind": "moe", "stage": stage, "dtype": dtype, "root": str(tmp_path / "root")}
    ranks.finish(given | {"case": "save", "ep_size": 2}, 2)
    for num, ep_size in ((1, 1), (2, 1), (2, 2)):
        again = str(tmp_path / f"again-{num}-{ep_size}")
        ranks.finish(given | {"case": "load", "ep_size": ep_size, "again": again}, num)


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (0, "bf16"), (1, "bf16")])
def test_a_pipeline(ranks: Ranks, tmp_path: Path, stage: int, dtype: str) -> None:
    given = {"kind": "pipe", "stage": stage, "dtype": dtype, "root": str(tmp_path / "root")}
    ranks.finish(given | {"case": "save"}, 2)
    for num in (1, 2):
        again = str(tmp_path / f"again-{num}")
        ranks.finish(given | {"case": "load", "again": again}, num)


def test_layers_that_are_tied_in_part(ranks: Ranks, tmp_path: Path) -> None:
    given = {"case": "refuse", "stage": 0, "dtype": "fp32", "root": str(tmp_path / "root")}
    ranks.finish(given, 2)
