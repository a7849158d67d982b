"""Ranks plan records together, whichever of them makes the step of its optimizer that is recorded first."""

from __future__ import annotations

import pytest

from tiers.memory.zygote import Lives

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize("case", ["skipped", "failed"])
def test_no_rank_waits_for_another_in_its_optimizers_step(lives: Lives, case: str) -> None:
    told = lives.live(nodes=[0, 0], case=f"tiers.records.planning_cases:{case}")
    assert [one.status for one in told] == [0, 0], lives.errors()
