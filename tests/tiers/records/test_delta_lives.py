"""Real trainings under gloo that are killed and taken up from their records, on this layout and others."""

from __future__ import annotations

import shutil

import pytest

from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.client import Client
from tiers.memory.agents import await_gone, kill, pid_of
from tiers.memory.zygote import Lives, Told

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

KILLED = -9
FSDP = {"layout": "fsdp", "memory": None, "delta": {}}


def check(lives: Lives, told: list[Told], step: int, digests: dict[int, str]) -> None:
    for one in told:
        assert one.lines, lives.errors()
        assert (one.restored, one.start) == (step, digests[step]), lives.errors()


@pytest.mark.soak_except("fsdp")
@pytest.mark.parametrize("layout", ["ddp", "zero1", "fsdp", "hsdp", "tp", "sp"])
def test_all_processes_are_killed(lives: Lives, layout: str) -> None:
    """They go on from the record of their last step, as the uninterrupted training does."""
    script, nodes = {"layout": layout, "memory": None, "delta": {}}, [0] * 4
    if layout == "fsdp":
        nodes = [0] * 2
    reference = lives.live(nodes=nodes, until=8, layout=layout, reference=True)[0].digests
    told = lives.live(nodes=nodes, until=5, die=True, **script)
    assert [t.status for t in told] == [KILLED] * len(nodes), lives.errors()
    again = lives.live(nodes=nodes, until=8, **script)
    check(lives, again, 5, reference)
    assert again[0].digests == {s: reference[s] for s in (6, 7, 8)}


def test_other_numbers_of_ranks(lives: Lives) -> None:
    """An optimizer that is element-wise replays the records of other ranks on any layout: here those of
    two lives before, on four ranks and on one."""
    first = lives.live(nodes=[0] * 4, until=4, die=True, **FSDP)
    assert first[0].digests.keys() == {1, 2, 3, 4}, lives.errors()
    alone = lives.live(nodes=[0], until=6, die=True, **FSDP)
    check(lives, alone, 4, first[0].digests)
    three = lives.live(nodes=[0] * 3, until=7, **FSDP)
    check(lives, three, 6, alone[0].digests)


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adagrad", "rmsprop"])
def test_fewer_ranks_with_each_optimizer(lives: Lives, optimizer: str) -> None:
    """All are killed; four ranks' records are replayed on two, and those of both on one."""
    script = {**FSDP, "optimizer": optimizer}
    four = lives.live(nodes=[0] * 4, until=5, die=True, **script)
    assert [t.status for t in four] == [KILLED] * 4, lives.errors()
    two = lives.live(nodes=[0] * 2, until=7, die=True, **script)
    check(lives, two, 5, four[0].digests)
    check(lives, lives.live(nodes=[0], until=8, **script), 7, two[0].digests)


def test_an_optimizer_that_looks_at_whole_tensors(lives: Lives) -> None:
    """Its records are replayed on the layout that made them, and refused on another."""
    script = {**FSDP, "optimizer": "muon"}
    told = lives.live(nodes=[0] * 2, until=4, die=True, **script)
    refused = lives.live(nodes=[0], until=5, **script)
    assert not [x for x in refused[0].lines if "restored" in x]
    assert "'optim' looks at whole tensors" in lives.errors()
    check(lives, lives.live(nodes=[0] * 2, until=5, **script), 4, told[0].digests)


def test_one_rank_is_killed_before_its_record(lives: Lives) -> None:
    """What one rank alone recorded is not taken."""
    told = lives.live(nodes=[0] * 2, until=9, kill=[1], kill_at=6, **FSDP)
    assert told[1].status == KILLED, lives.errors()
    again = lives.live(nodes=[0] * 2, until=9, **FSDP)
    check(lives, again, 5, told[0].digests)


def test_records_that_end_on_one_rank(lives: Lives) -> None:
    """It alone finds that records must be planned anew; all make the next full save together."""
    script = {**FSDP, "grow_at": 4, "grow": [1]}
    told = lives.live(nodes=[0] * 2, until=9, die=True, **script)
    assert [t.status for t in told] == [KILLED] * 2, lives.errors()
    again = lives.live(nodes=[0] * 2, until=10, **script)
    check(lives, again, 9, told[0].digests)


@pytest.mark.soak
def test_ranks_are_tuned_alike(lives: Lives) -> None:
    """Rank 0 measures and decides; a rank that saved at another step would be waited for in vain."""
    script = {**FSDP, "settle": False, "auto": {"mtbf_hours": 0.001, "overhead": 0.9}}
    told = lives.live(nodes=[0] * 2, until=60, die=True, **script)
    assert told[0].events("retuned"), lives.errors()
    assert not told[1].events("retuned")
    again = lives.live(nodes=[0] * 2, until=61, **script)
    check(lives, again, again[0].restored, told[0].digests)


@pytest.mark.soak
@pytest.mark.parametrize("feed", ["state", "gradient"])
def test_memory_and_records(lives: Lives, feed: str) -> None:
    """From the newest snapshot in memory, by the records after it; when nodes are lost, from storage."""
    options = {"redundancy": "none", "feed": feed}
    script = {"layout": "fsdp", "memory": 2, "delta": {}, "options": options}
    told = lives.live(nodes=[0, 1], until=7, die=True, **script)
    again = lives.live(nodes=[0, 1], until=8, **script)
    check(lives, again, 7, told[0].digests)
    assert all(bool(one.events("restore.from_replica")) == (feed == "gradient") for one in again)
    assert all(one.moved.get("memory.local.bytes") for one in again)
    for n in (0, 1):
        kill(lives.node(n))
        shutil.rmtree(lives.node(n))
    last = lives.live(nodes=[0, 1], until=8, **script)
    check(lives, last, 8, again[0].digests)  # from the first step's full save, by all records
    for n in (0, 1):
        client = Client(lives.node(n), deadline_s=120.0)
        client.ask(w.Stop(free=True))
        await_gone(pid_of(lives.node(n)))
