"""A GPT of Megatron-Core that is saved by holdfast's strategies, and killed, trains as one that is not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from .forked import Ranks
from .killing import KILLS, killed, run_of, same

pytestmark = [pytest.mark.distributed, pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    log = tmp_path_factory.mktemp("ranks") / "log"
    with Ranks("integrations.trainers.train_megatron", log) as found:
        yield found


@pytest.mark.parametrize(
    ("tp", "stage", "in_background"),
    [(2, 0, False), (1, 1, True)],
    ids=["tensor parallelism", "distributed optimizer, in the background"],
)
def test_killed_at_ten_moments(
    ranks: Ranks, tmp_path: Path, tp: int, stage: int, in_background: bool
) -> None:
    given: dict[str, Any] = {"tp": tp, "stage": stage, "dtype": "bf16"}
    alone = run_of(tmp_path / "alone", **given)
    ranks.finish(asdict(alone), 2)
    run = run_of(tmp_path / "run", root=str(tmp_path / "root"), memory=in_background, **given)
    chance = random.Random(f"{tp} {stage}")
    for _ in range(KILLS):
        killed(ranks, run, 2, chance)
    ranks.finish(asdict(run), 2)
    same(run, alone)
