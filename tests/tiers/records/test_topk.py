"""TopK under DDP on real ranks: its gradients, its state, and records of what it sends."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cli.calling import call, call_json
from tiers.memory.zygote import Lives, Told

from .test_delta_lives import KILLED, check

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TOPK = {"layout": "topk", "memory": None, "delta": {}}


def run_case(lives: Lives, name: str, ranks: int = 2) -> None:
    told = lives.live(nodes=[0] * ranks, case=f"tiers.records.topk_cases:{name}")
    assert [t.status for t in told] == [0] * ranks, lives.errors()


@pytest.mark.parametrize(
    "name", ["equals_a_dense_reference", "gradients_accumulate", "what_is_infinite_does_not_stay"]
)
def test_gradients(lives: Lives, name: str) -> None:
    run_case(lives, name)


def test_residuals_are_state(lives: Lives) -> None:
    run_case(lives, "residuals_are_saved")
    for ranks in (1, 3):
        run_case(lives, "residuals_of_another_number_of_ranks", ranks)


def reference(lives: Lives, until: int, ranks: int = 2, **topk: object) -> dict[int, str]:
    script = {"layout": "topk", "topk": topk}
    told = lives.live(nodes=[0] * ranks, until=until, reference=True, **script)
    assert told[0].digests == told[1].digests, lives.errors()
    return told[0].digests


@pytest.mark.soak
def test_killed_and_taken_up(lives: Lives) -> None:
    """Parameters and states after the last step are those of the uninterrupted run, after clipping too;
    without memory of what was not sent, so is all that follows."""
    digests = reference(lives, 8, error_feedback=False)
    script = {**TOPK, "topk": {"error_feedback": False}}
    told = lives.live(nodes=[0] * 2, until=5, die=True, **script)
    assert [t.status for t in told] == [KILLED] * 2, lives.errors()
    again = lives.live(nodes=[0] * 2, until=8, **script)
    check(lives, again, 5, digests)
    assert again[0].digests == {s: digests[s] for s in (6, 7, 8)}


def test_the_residual_is_of_the_full_save(lives: Lives) -> None:
    """From a full save all goes on bit for bit.  From a record, parameters and states are exact, and what
    ranks had kept back is that of the full save before: what follows is another run."""
    digests = reference(lives, 8)
    told = lives.live(nodes=[0] * 2, until=4, die=True, durable=4, **TOPK)
    assert [t.status for t in told] == [KILLED] * 2, lives.errors()
    again = lives.live(nodes=[0] * 2, until=6, die=True, durable=4, **TOPK)
    check(lives, again, 4, digests)
    assert again[0].digests == {s: digests[s] for s in (5, 6)}
    assert not any("extras.resized" in x.get("events", ()) for one in again for x in one.lines)
    last = lives.live(nodes=[0] * 2, until=8, durable=4, **TOPK)
    check(lives, last, 6, digests)
    assert last[0].digests[7] != digests[7]
    assert last[0].digests == last[1].digests


@pytest.mark.soak
def test_the_residual_in_memory(lives: Lives) -> None:
    """Snapshots are full saves, too."""
    digests = reference(lives, 6)
    script = {"layout": "topk", "memory": 1, "options": {"redundancy": "none"}}
    told = lives.live(nodes=[0] * 2, until=4, die=True, **script)
    assert [t.status for t in told] == [KILLED] * 2, lives.errors()
    again = lives.live(nodes=[0] * 2, until=6, **script)
    check(lives, again, 4, digests)
    assert all(one.moved.get("memory.local.bytes") for one in again)
    assert again[0].digests == {s: digests[s] for s in (5, 6)}


def test_other_numbers_of_ranks(lives: Lives, tmp_path: Path) -> None:
    """The records of two ranks on three, and those of three on one; and without the training script."""
    first = lives.live(nodes=[0] * 2, until=4, die=True, **TOPK)
    assert first[0].digests.keys() == {1, 2, 3, 4}, lives.errors()
    three = lives.live(nodes=[0] * 3, until=6, die=True, **TOPK)
    check(lives, three, 4, first[0].digests)
    alone = lives.live(nodes=[0], until=7, **TOPK)
    check(lives, alone, 6, three[0].digests)
    check_offline(lives, tmp_path, three)


def check_offline(lives: Lives, place: Path, told: list[Told]) -> None:
    """`holdfast log` knows the records, and `holdfast replay` makes the same full step of one."""
    code, shown = call_json("log", place / "root")
    assert code == 0, shown
    first, second, *_ = shown["records"]
    assert [(r["first"], r["last"], r["ranks"]) for r in (first, second)] == [(2, 4, 2), (5, 6, 3)]
    code, out, err = call("replay", place / "root", place / "full", "--to", 6)
    assert code == 0, out + err
    shutil.rmtree(place / "root")
    shutil.move(place / "full", place / "root")
    again = lives.live(nodes=[0] * 2, until=7, **TOPK)
    check(lives, again, 6, told[0].digests)


def test_bytes(lives: Lives, tmp_path: Path) -> None:
    """A record of two ranks is at most 1.5 % of parameters and moments, though they choose little alike."""
    width = 700
    lives.live(nodes=[0] * 2, until=4, width=width, **TOPK)
    full = 3 * 4 * (width * 2 * width * 2 + 3 * width)
    record = sum(f.stat().st_size for f in (tmp_path / "root/log").glob("*/0000000004-*/*.log"))
    assert 0 < record <= 0.015 * full, (record, full, lives.errors())
