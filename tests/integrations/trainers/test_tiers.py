"""Snapshots in memory and records under trainers, on two ranks: killed, they go on where they were.

The trainer itself saves nothing before the end, so that no run could go on from anything else.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from integrations.trainers.forked import Ranks, losses, value
from integrations.trainers.tiny import OFFLINE, Journal, run_of

pytestmark = [pytest.mark.soak, pytest.mark.distributed]

MEMORY = "holdfast.Memory(redundancy='none', budget='64MiB')"
TIERS: dict[str, dict[str, str]] = {
    "memory": {"every": "holdfast.Every(memory=1)", "memory": MEMORY, "when_busy": "'queue'"},
    "records": {"every": "holdfast.Every(delta=1)", "delta": "holdfast.Delta()"},
    "both": {
        "every": "holdfast.Every(memory=2, delta=1)",
        "memory": MEMORY,
        "delta": "holdfast.Delta()",
        "when_busy": "'queue'",
    },
}
KILLS = 3


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Ranks that run a module, by its name."""
    folder = tmp_path_factory.mktemp("ranks")
    with ExitStack() as stack:
        known: dict[str, Ranks] = {}

        def of(module: str) -> Ranks:
            if module not in known:
                ranks = Ranks(
                    f"integrations.trainers.{module}", folder / f"{module}.log", **OFFLINE
                )
                known[module] = stack.enter_context(ranks)
            return known[module]

        yield of


def steps_of(rows: list[dict[str, Any]]) -> list[int]:
    return [row["step"] for row in rows if "step" in row and "end" not in row]


def trained(journal: Journal) -> set[tuple[Any, ...]]:
    """All that was told of any step, at each try."""
    rows = (row for row in journal.read() if "step" in row and "end" not in row)
    return {tuple(sorted(row.items())) for row in rows}


def killed(
    ranks: Ranks, journal: Journal, options: dict[str, Any], dies: list[int], tiers: str
) -> None:
    """Kill a run again and again, and let it end."""
    seen = 0
    for die in [*dies, 0]:
        (ranks.die if die else ranks.finish)({**options, "die": die}, 2)
        before, after = journal.read()[:seen], journal.read()[seen:]
        seen += len(after)
        if not before:
            continue
        first, last = steps_of(after)[0], steps_of(before)[-1]
        assert first >= last - (2 if tiers == "memory" else 0), (first, last)


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp"])
def test_transformers(fsdp: bool, tiers: str, launched: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    ranks, args = launched("train_transformers"), {"per_device_train_batch_size": 2}
    given: dict[str, Any] = {"fsdp": fsdp, "args": args}
    options, own = run_of(tmp_path, "own", own=True, **given)
    ranks.finish(options, 2)
    given |= {"args": {**args, "save_steps": 1000}, "holdfast": TIERS[tiers]}
    options, journal = run_of(tmp_path, "killed", **given)
    draw = random.Random(f"{fsdp} {tiers}")
    killed(ranks, journal, options, [draw.randint(15, 19) for _ in range(KILLS)], tiers)
    assert trained(journal) == trained(own)
    assert journal.read()[-1] == own.read()[-1]


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp"])
def test_accelerate(fsdp: bool, tiers: str, launched: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    ranks = launched("train_accelerate")
    given: dict[str, Any] = {"fsdp": fsdp, "batch": 2, "accumulate": 1}
    options, own = run_of(tmp_path, "own", use="own", **given)
    ranks.finish(options, 2)
    options, journal = run_of(tmp_path, "killed", use="step", holdfast=TIERS[tiers], **given)
    draw = random.Random(f"{fsdp} {tiers}")
    killed(ranks, journal, options, [draw.randint(21, 27) for _ in range(KILLS)], tiers)
    assert trained(journal) == trained(own)
    assert journal.read()[-1] == own.read()[-1]


@pytest.mark.parametrize("every", [{"memory": 1}, {"delta": 1}, {"memory": 2, "delta": 1}], ids=str)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_lightning(kind: str, every: dict[str, int], launched: Any, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from integrations.trainers.lit import Settings

    ranks, paths = launched("lit"), str(tmp_path / "paths")
    own = ranks.printed(Settings(kind=kind, paths=f"{tmp_path}/own").text(), 2)
    every = {"durable": 1_000_000, **every}
    run = Settings(
        kind=kind, root=str(tmp_path / "root"), paths=paths, ckpt_path="newest", every=every
    )
    run.save_every = 1000
    seen: list[str] = []
    for attempt in range(KILLS):
        seen += ranks.printed(run.text(), 2, 6 + attempt, seed=attempt)
        step = int(value(seen, "BEGIN").split()[1])
        assert step > 0 or not attempt
    seen += ranks.printed(run.text(), 2)
    assert losses(seen) == losses(own)
    assert value(seen, "END") == value(own, "END")
