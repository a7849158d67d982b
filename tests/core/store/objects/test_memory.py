"""The memory tier over a bucket: snapshots are flushed to it by agents, which also commit for the dead."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import holdfast
from tiers.memory.agents import kill_together, trainers
from tiers.memory.zygote import KILLED, Lives, lose, train

from .fixtures import fresh
from .servers import BUCKET, SeaweedFS

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.soak]

WIDTH = 2400
"""Makes images of several parts, so that an upload is seen while it is under way."""


def uploads(seaweed: SeaweedFS, prefix: str) -> set[str]:
    """Keys of the uploads that have begun and not ended."""
    found = seaweed.client().list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)
    return {upload["Key"] for upload in found.get("Uploads", ())}


def test_agents_commit_for_a_training_that_died(lives: Lives, seaweed: SeaweedFS) -> None:
    prefix = fresh()
    root = seaweed.url(prefix)
    script = {"width": WIDTH, "durable": 3, "root": root, "env": seaweed.env}
    options = {"redundancy": "none", "bandwidth": "4MB"}
    with ThreadPoolExecutor(1) as pool:
        living = pool.submit(lives.live, nodes=[0, 1], until=99, options=options, **script)
        while len(uploads(seaweed, prefix)) < 2:
            assert not living.done(), lives.errors()
            time.sleep(0.05)
        kill_together(pid for n in (0, 1) for pid in trainers(lives.node(n)))
        assert [one.status for one in living.result()] == [KILLED] * 2, lives.errors()
    assert holdfast.steps(root) == [], "by nobody yet"
    until = time.monotonic() + 120
    while holdfast.steps(root) != [3]:
        assert time.monotonic() < until, (lives.node(0) / "agent.log").read_text()
        time.sleep(0.2)
    lose(lives, 0, 1)
    (told,) = lives.live(nodes=[2], until=3, options={"redundancy": "none"}, **script)
    reference = lives.live(nodes=[0, 1], until=3, width=WIDTH, reference=True)[0].digests[3]
    assert (told.restored, told.start) == (3, reference)


def test_a_lost_node_is_rebuilt_beside_a_bucket(
    lives: Lives,
    seaweed: SeaweedFS,
) -> None:
    """Snapshots of each step, durable saves of some by the agents; a node is lost, and its part rebuilt."""
    script = {"durable": 2, "root": seaweed.url(fresh()), "env": seaweed.env}
    train(lives, 5, [0, 1, 2], options={"redundancy": "parity"}, **script)
    lose(lives, 1)
    told = lives.live(nodes=[0, 3, 2], until=7, options={"redundancy": "parity"}, **script)
    assert [one.restored for one in told] == [5] * 3, lives.errors()
    reference = lives.live(nodes=[0, 1, 2], until=7, reference=True)[0].digests
    assert told[0].start == reference[5]
    assert told[0].digests[7] == reference[7]
    assert holdfast.steps(script["root"])[-1] == 6
