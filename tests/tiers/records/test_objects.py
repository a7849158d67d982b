"""Objects of the script's own, whose state has sharded tensors: records hold these, whatever the layout."""

from __future__ import annotations

import pytest

import holdfast
from tiers.memory.zygote import Lives

from .object_cases import BEGINS

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.soak_except("1", "3")
@pytest.mark.parametrize("num_ranks", [2, 1, 3])
def test_sharded_tensors_in_the_state_of_an_object(lives: Lives, num_ranks: int) -> None:
    """They come with the step, and after it records go on.  That there are more takes a full save."""
    told = lives.live(nodes=[0] * 2, case="tiers.records.object_cases:dies")
    assert [t.status for t in told] == [-9, -9], lives.errors()
    told = lives.live(nodes=[0] * num_ranks, case="tiers.records.object_cases:goes_on")
    assert [t.status for t in told] == [0] * num_ranks, lives.errors()
    assert holdfast.steps(lives.place / "root")[:2] == [1, BEGINS + 2]
