"""DeepSpeed inside transformers' Trainer and under an Accelerator: killed, and the same as if it were not.

Held against the trainer's own run with the same engine, which nobody has interrupted.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from integrations.trainers import test_accelerate, test_transformers
from integrations.trainers.forked import Ranks
from integrations.trainers.tiny import OFFLINE, run_of

pytestmark = [pytest.mark.soak, pytest.mark.distributed]

HALF = {"per_device_train_batch_size": 2}
OF_CONFIG = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
}
SNAPSHOTS = {
    "every": "holdfast.Every(memory=1)",
    "memory": "holdfast.Memory(redundancy='none', budget='64MiB')",
    "when_busy": "'queue'",
}
TRAINERS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0": (1, {"zero": 0}),
    "stage 1, bf16": (2, {"zero": 1, "bf16": True, "args": HALF}),
    "stage 2, the best model": (
        2,
        {"zero": 2, "early": True, "args": {**test_transformers.BEST, **HALF}},
    ),
    "stage 3": (2, {"zero": 3, "args": HALF}),
    "stage 3, in memory": (
        2,
        {"zero": 3, "args": {**HALF, "save_steps": 100}, "holdfast": SNAPSHOTS},
    ),
    "stage 1, optimizer and scheduler of its configuration": (
        2,
        {"zero": 1, "config": OF_CONFIG, "args": {**HALF, "warmup_steps": 8}},
    ),
    "stage 2, an adapter": (1, {"zero": 2, "lora": True}),
    "stage 3, an adapter": (1, {"zero": 3, "lora": True}),
}
ACCELERATED: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 1": (1, {"zero": 1, "noisy": True}),
    "stage 3": (2, {"zero": 3, "batch": 2}),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    for needed in ("transformers", "accelerate", "deepspeed"):
        pytest.importorskip(needed)
    log = tmp_path_factory.mktemp("ranks") / "log"
    with Ranks("integrations.trainers.train_zero", log, is_group_of_one=True, **OFFLINE) as found:
        yield found


@pytest.mark.parametrize("name", TRAINERS)
def test_the_trainer(name: str, ranks: Ranks, tmp_path: Path) -> None:
    num, given = TRAINERS[name]
    own = test_transformers.uninterrupted(ranks, tmp_path, num, given)
    for number in range(2):
        (folder := tmp_path / str(number)).mkdir()
        moment = random.Random(f"{name} {number}").randint(8, 60)
        test_transformers.compare(ranks, folder, own, num, given, moment)


@pytest.mark.parametrize("name", ACCELERATED)
def test_an_accelerator(name: str, ranks: Ranks, tmp_path: Path) -> None:
    num, given = ACCELERATED[name]
    given = {**given, "accelerate": True}
    own = test_accelerate.uninterrupted(ranks, tmp_path, num, given)
    for number in range(2):
        (folder := tmp_path / str(number)).mkdir()
        moment = random.Random(f"{name} {number}").randint(8, 70)
        test_accelerate.compare(ranks, folder, own, num, given, moment)


def test_stage_3_on_two_ranks_and_then_stage_1_on_one(ranks: Ranks, tmp_path: Path) -> None:
    """The same samples in the same order; sums are added in another one."""
    given = {"zero": 3, "args": HALF, "drop": 0.0, "size": 48}
    own = test_transformers.uninterrupted(ranks, tmp_path, 2, given)
    options, journal = run_of(tmp_path, "killed", **given)
    ranks.die({**options, "die": 40}, 2)
    alone = {**options, "zero": 1, "args": {"per_device_train_batch_size": 4}}
    before = len(journal.read())
    assert ranks.run(alone) == [0]
    expected = {row["step"]: row["loss"] for row in own.read() if "end" not in row}
    rows = journal.read()
    assert rows[before]["step"] > 3, "it went on"
    for row in rows:
        if "end" not in row:
            assert row["loss"] == pytest.approx(expected[row["step"]], rel=1e-4)


def test_frozen_weights_are_told_at_stage_3(ranks: Ranks, tmp_path: Path) -> None:
    for stage, is_whole in ((2, False), (3, True)):
        before = ranks.log.stat().st_size
        options, _ = run_of(tmp_path, str(stage), zero=stage, lora=True, args={"max_steps": 3})
        assert ranks.run(options) == [0]
        told = ranks.log.read_bytes()[before:]
        assert (b"are saved all the same" in told) == is_whole
        with holdfast.open(tmp_path / str(stage) / "holdfast") as saved:
            names = [name for name in saved.names() if name.startswith("model.")]
        assert any("lora_" in name for name in names)
        assert any("lora_" not in name for name in names) == is_whole


@pytest.mark.parametrize("stage", [1, 3])
def test_a_damaged_step(stage: int, ranks: Ranks, tmp_path: Path) -> None:
    """It is passed over; at stage 3, where no second engine can be made, the run ends and says so."""
    given = {"zero": stage, "hidden": 4096}
    own = test_transformers.uninterrupted(ranks, tmp_path, 1, given)
    options, journal = run_of(tmp_path, "killed", **given)
    ranks.die({**options, "die": 45})
    root = tmp_path / "killed" / "holdfast"
    older = holdfast.steps(root)[-2]
    test_transformers.damage_the_newest(root)
    before = ranks.log.stat().st_size
    assert ranks.run(options) == [1 if stage == 3 else 0]
    if stage == 3:
        assert b"an older step N: holdfast ls" in ranks.log.read_bytes()[before:]
        assert ranks.run({**options, "resume": older}) == [0]
    seen = test_transformers.losses(journal.read())
    assert seen == test_transformers.losses(own.read())
    assert journal.read()[-1] == own.read()[-1]


def test_a_scheduler_prepared_without_its_model_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    options, _ = run_of(tmp_path, "run", zero=1, accelerate=True, apart=True)
    before = ranks.log.stat().st_size
    assert ranks.run(options) == [1]
    assert b"prepared without its model" in ranks.log.read_bytes()[before:]


def test_records_are_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    delta = {"every": "holdfast.Every(delta=1)", "delta": "holdfast.Delta()"}
    options, _ = run_of(tmp_path, "run", zero=1, holdfast=delta)
    before = ranks.log.stat().st_size
    assert ranks.run(options) == [1]
    assert (
        b"does not know the gradients of 'optimizer', a DeepSpeed"
        in ranks.log.read_bytes()[before:]
    )
