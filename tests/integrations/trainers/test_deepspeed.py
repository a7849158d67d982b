"""An attached DeepSpeed engine that is killed and killed again trains as one that DeepSpeed runs alone."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import holdfast

os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is imported
pytest.importorskip("deepspeed")

from .forked import Ranks
from .killing import KILLS, STEPS, killed, losses_of, run_of, same

pytestmark = [pytest.mark.distributed, pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    log = tmp_path_factory.mktemp("ranks") / "log"
    with Ranks("integrations.trainers.train_deepspeed", log, is_group_of_one=True) as found:
        yield found


@pytest.mark.parametrize(
    ("num", "stage", "dtype", "memory"),
    [
        (1, 1, "fp16", False),
        (2, 1, "bf16", False),
        (2, 2, "fp16", True),
        (2, 3, "fp16", False),
        (2, 0, "fp32", False),
    ],
)
def test_killed_at_ten_moments(
    ranks: Ranks, tmp_path: Path, num: int, stage: int, dtype: str, memory: bool
) -> None:
    alone = run_of(tmp_path / "alone", stage=stage, dtype=dtype)
    ranks.finish(asdict(alone), num)
    root = str(tmp_path / "root")
    run = run_of(tmp_path / "run", stage=stage, dtype=dtype, root=root, memory=memory)
    chance = random.Random(f"{num} {stage} {dtype}")
    for _ in range(KILLS):
        killed(ranks, run, num, chance)
    ranks.finish(asdict(run), num)
    same(run, alone)


@pytest.mark.parametrize(("model", "stage"), [("moe", 2), ("pipe", 1)])
def test_experts_and_stages_killed_at_ten_moments(
    ranks: Ranks, tmp_path: Path, model: str, stage: int
) -> None:
    given: dict[str, Any] = {"stage": stage, "dtype": "bf16", "model": model}
    alone = run_of(tmp_path / "alone", **given)
    ranks.finish(asdict(alone), 2)
    run = run_of(tmp_path / "run", root=str(tmp_path / "root"), **given)
    chance = random.Random(model)
    for _ in range(KILLS):
        killed(ranks, run, 2, chance)
    ranks.finish(asdict(run), 2)
    same(run, alone)


@pytest.mark.parametrize(("stage", "dtype"), [(1, "fp32"), (2, "bf16"), (3, "bf16")])
def test_killed_on_two_ranks_and_on_one(
    ranks: Ranks, tmp_path: Path, stage: int, dtype: str
) -> None:
    """One rank takes the halves of a batch in two micro-steps: the same gradients, and no dropout."""
    alone = run_of(tmp_path / "alone", stage=stage, dtype=dtype, dropout=0.0)
    ranks.finish(asdict(alone), 2)
    root = str(tmp_path / "root")
    run = run_of(tmp_path / "run", stage=stage, dtype=dtype, root=root, dropout=0.0)
    chance = random.Random(stage)
    for number in range(KILLS):
        killed(ranks, run, 2 if number < KILLS // 2 else 1, chance)
    ranks.finish(asdict(run), 1)
    same(run, alone)


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_goes_on_from_a_conversion(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    alone = run_of(tmp_path / "alone", stage=stage, dtype="bf16", dropout=0.0)
    ranks.finish(asdict(alone), 2)
    root = str(tmp_path / "root")
    run = run_of(tmp_path / "run", stage=stage, dtype="bf16", dropout=0.0, root=root)
    ranks.finish(asdict(run), 2)
    same(run, alone)
    holdfast.convert(root, tmp_path / "universal", to="deepspeed", step=STEPS // 2)
    after = run_of(
        tmp_path / "after",
        stage=stage,
        dtype="bf16",
        dropout=0.0,
        universal=str(tmp_path / "universal"),
    )
    ranks.finish(asdict(after), 2)
    expected = {at: loss for at, loss in losses_of(alone).items() if at[0] > STEPS // 2}
    assert losses_of(after) == expected
    assert Path(after.out, "final").read_text() == Path(alone.out, "final").read_text()
