"""Storage that does not keep up, on several ranks: training waits, or goes on without records."""

from __future__ import annotations

from typing import Any

import pytest

from tiers.memory.zygote import Lives

from .test_delta_lives import KILLED

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STILL_S = 3.0


def slow(lives: Lives, when_full: str, until: int, *, stops_until: int, queue: int) -> list[Any]:
    """A life in which rank 1's writer stands still from step 5, until training is at a later step or has
    made none for `STILL_S`; then both ranks are killed."""
    script = {"layout": "fsdp", "memory": None, "settle": False, "pause": 0.1}
    script |= {"flush": [stops_until, until]}  # both have written what waits before the last steps
    delta = {"queue": queue, "when_full": when_full}
    told = lives.live(
        nodes=[0, 0], until=until, die=True, delta=delta,
        writer_stops=[1, 5, stops_until, STILL_S], **script
    )  # fmt: skip
    assert [t.status for t in told] == [KILLED] * 2, lives.errors()
    reference = lives.live(nodes=[0, 0], until=until, layout="fsdp", reference=True)[0].digests
    again = lives.live(nodes=[0, 0], until=until, delta=delta, **script)
    assert {a.restored for a in again} == {until}, lives.errors()
    assert {a.start for a in again} == {reference[until]}
    return told


def longest(told: Any, until: int) -> float:
    return max(line["took"] for line in told.lines if "took" in line and line["step"] < until)


@pytest.mark.soak
def test_training_waits(lives: Lives) -> None:
    """For as long as storage takes nothing; no record is missing."""
    told = slow(lives, "wait", 16, stops_until=16, queue=6)
    assert longest(told[1], 16) > STILL_S / 2
    assert not any(t.events("delta.broken") for t in told)
    assert told[1].events("delta.wait")


@pytest.mark.soak
def test_training_goes_on(lives: Lives) -> None:
    """Rank 1 alone drops records; both make a full save at the same step, and record from there.

    Rank 0's writer may be 2 s behind on a busy machine; rank 1's stops for more steps than the queue holds.
    """
    told = slow(lives, "drop", 40, stops_until=30, queue=20)
    assert (
        max(longest(one, 30) for one in told) < 0.8 * STILL_S
    )  # a busy machine takes its time, too
    assert not told[0].events("delta.broken")
    assert [e["why"] for e in told[1].events("delta.broken")] == ["storage is too slow"]
    assert not told[1].events("delta.wait")
    wrote = [int(e["step"]) for e in told[1].events("delta.wrote")]
    assert max(wrote) >= 40 - 3, wrote  # after a gap
