"""Random faults on one training: see `chaos`.

HOLDFAST_CHAOS_FAULTS faults (4 if nothing is said), drawn from HOLDFAST_CHAOS_SEED.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .chaos import OPTIONS, Chaos, check_files
from .cluster import Cluster
from .story import Story
from .told import Told, check_nothing_left

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.usefixtures("needs_nodes"),
]
FAULTS = int(os.environ.get("HOLDFAST_CHAOS_FAULTS", "4"))
SEED = int(os.environ.get("HOLDFAST_CHAOS_SEED", "1"))


@pytest.mark.timeout(600 + 60 * FAULTS)
def test_random_faults(tmp_path: Path) -> None:
    with Cluster(4, tmp_path / "nodes", head=True) as cluster:
        story = Story(cluster, tmp_path, OPTIONS, nnodes="4:4")
        told = Told(cluster, story)
        chaos = Chaos(told, SEED)
        chaos.run(FAULTS)
        story.end(told.here)
        check_nothing_left(story, told.here)
        check_files(story.newest(told.here))
    assert len(chaos.lines) == FAULTS
