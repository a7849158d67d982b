"""Elastic torchrun with snapshots in memory: whatever is lost, training goes on from the newest kept.

Three jobs, each with one failure after the other: four nodes with a rank each, which become three, five,
three and two; four nodes with two ranks each, under HSDP; two of them under tensor parallelism.  After each
failure all ranks must have restored one step, no older than the newest that was complete, bit for bit,
without a byte from storage; and the steps that follow must be those of the same ranks without holdfast.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast

from .cluster import Cluster, Node
from .elastic_train import Options
from .job import TOGETHER
from .story import Story
from .told import ON, Told, check, check_nothing_left

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.usefixtures("needs_nodes"),
]
SEVERAL = Options(
    width=192,
    every={"memory": 1, "durable": 1000},
    memory={"redundancy": "rs(2)", "bandwidth": "2MB"},
    sigterm_s=None,
)
"""Images of 300 kB; what protects them is under way for a third of a second."""
CUT_S, PATIENT = 20, 100
"""How long a link is cut; with so many `tcp_retries2` no connection fails within that."""


# -- four nodes -----------------------------------------------------------------------------------


class Four(Told):
    """Agents die and links fail, which no rank need notice; then nodes come and go."""

    def agents_die(self) -> None:
        """One at any time, one in mid-snapshot, one in mid-parity; nobody restarts."""
        story, nodes = self.story, self.here
        story.kill_agent(nodes[1])
        self.commits()
        story.stop_agent(nodes[2])
        self.await_asked(nodes[2])
        story.kill_agent(nodes[2])
        self.commits()
        self.await_parity(nodes[3])
        story.kill_agent(nodes[3])
        assert self.filling(nodes[3], "guard")
        self.commits()

    def links_fail(self) -> None:
        """Cut for so long that all wait for it, then slow; nobody restarts."""
        for node in self.here:
            self.story.impatient(node, PATIENT)
        self.cut_at = time.time()
        self.here[1].cut()
        time.sleep(CUT_S)
        self.here[1].join()
        self.commits()
        self.protected = [self.guarded(node) for node in self.here]
        for node in self.here:
            self.story.impatient(node)
        self.here[2].slow("8mbit")
        self.commits(1)
        self.here[2].normal()

    def guarded(self, node: Node) -> int:
        """The newest step that the agent there keeps something for others of."""
        found = [s for s in self.story.slots(node) if s["kind"] == "guard"]
        return max(int(s["step"]) for s in found if s["phase"] == "ready")


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Four]:
    """The whole story; leaving the cluster asserts that no process or namespace is left.

    Two losses are borne from one complete snapshot to the next, so each failure waits for one.
    """
    folder = tmp_path_factory.mktemp("four")
    with Cluster(4, folder / "nodes", head=True) as cluster:
        nodes = cluster.nodes
        told = Four(cluster, Story(cluster, folder, SEVERAL, nnodes="1:5", conf=TOGETHER))
        told.links_fail()
        told.agents_die()
        told.kill_agent_in_rebuild(nodes[1], of=told.lose, lost=nodes[0])
        told.commits(1)
        told.add(2)
        told.commits(1)
        told.lose(nodes[1], nodes[4])
        told.commits(1)
        told.lose(nodes[2])
        told.commits(1)
        told.story.end(told.here)
        check_nothing_left(told.story, told.here)
        yield told


def test_agents_die_and_links_fail_and_training_goes_on(four: Four) -> None:
    """In one life: whatever snapshots failed, no step differs from the training without holdfast."""
    before, _, _ = four.chapters[0]
    reference = four.story.reference(12 * ON, num_ranks=4)
    for life in before:
        shared = life.steps.keys() & reference.keys()
        assert len(shared) > 4 * ON
        assert all(life.steps[n]["digest"] == reference[n]["digest"] for n in shared)
        assert life.of("snapshot.failed")


def test_a_link_is_cut_for_20_seconds(four: Four) -> None:
    """In the same life.  All wait for it, and what is snapshot afterwards is protected as before."""
    before, _, _ = four.chapters[0]
    for life, protected in zip(before, four.protected):
        times = {step: life.steps[step]["time"] - four.cut_at for step in life.steps}
        assert not [at for at in times.values() if 1 < at < CUT_S]
        assert times[protected] > CUT_S


def test_three_of_four_nodes_go_on(four: Four) -> None:
    """While they rebuild what the fourth held, an agent dies."""
    before, after, kept = four.chapters[0]
    check(four.story, before, after, kept)
    assert sum(life.moved("rebuilt") for life in after) > 0


def test_five_nodes_go_on_where_three_were(four: Four) -> None:
    """torchrun stops the three by SIGTERM, which kills them."""
    before, after, kept = four.chapters[1]
    check(four.story, before, after, kept)
    assert {life.start["world"] for life in after} == {5}


def test_two_of_five_nodes_vanish_at_once(four: Four) -> None:
    before, after, kept = four.chapters[2]
    check(four.story, before, after, kept)
    assert sum(life.moved("rebuilt") for life in after) > 0


def test_two_of_three_nodes_go_on(four: Four) -> None:
    """They are too few for what was asked, and protect each other as well as they can."""
    before, after, kept = four.chapters[3]
    check(four.story, before, after, kept)
    for life in four.story.newest(four.here):
        assert [e["kept"] for e in life.of("memory.weaker")] == ["parity"]
        assert life.committed[-1] > life.start["restored"]


# -- two ranks per node ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """Four nodes with two ranks each, under HSDP: an agent is killed, one rank is, bits flip, a node
    vanishes."""
    folder = tmp_path_factory.mktemp("eight")
    options = Options(
        layout="hsdp", every={"memory": 1, "durable": 1000}, memory={}, sigterm_s=None
    )
    with Cluster(4, folder / "nodes", head=True) as cluster:
        told = Told(cluster, Story(cluster, folder, options, nnodes="4:4", nproc=2))
        a, b, c, _ = cluster.nodes
        told.story.kill_agent(b)
        told.commits(3)
        told.kill_rank(c, 1)
        told.commits(2)
        told.kill_ranks(a, meanwhile=told.damage(c, "share"))  # rank 0's: nobody commits any more
        told.commits(2)
        told.replace(a)
        told.story.end(told.here)
        check_nothing_left(told.story, told.here)
        yield told


def test_two_ranks_of_a_node_share_an_agent(eight: Told) -> None:
    """It dies, and both go on with the next."""
    before, _, _ = eight.chapters[0]
    reference = eight.story.reference(max(life.last for life in before), num_ranks=8)
    assert all(x.steps[n]["digest"] == reference[n]["digest"] for x in before for n in x.steps)
    restarted = [life.start["rank"] for life in before if life.of("agent.restarted")]
    assert sorted(restarted) == [2, 3]


def test_one_rank_of_eight_is_killed(eight: Told) -> None:
    """SIGKILL.  torchrun ends the others and starts all again: each has its image where it is."""
    before, after, kept = eight.chapters[0]
    assert len(kept) == len(after) == 8
    check(eight.story, before, after, kept)
    assert not any(life.moved("peer") or life.moved("rebuilt") for life in after)


def test_bits_flip_in_the_segments_of_a_node(eight: Told) -> None:
    """Found by its two ranks, and mended from what their replicas on another node have kept."""
    before, after, kept = eight.chapters[1]
    assert len(kept) == len(after) == 8
    check(eight.story, before, after, kept)
    assert sum(life.moved("rebuilt") for life in after) > 0


def test_a_node_with_two_ranks_of_eight_vanishes(eight: Told) -> None:
    """What they held is rebuilt from what their replicas on another node have kept."""
    before, after, kept = eight.chapters[2]
    assert len(kept) == 6
    check(eight.story, before, after, kept)
    assert sum(life.moved("rebuilt") for life in after) > 0


def test_memory_is_full_and_then_it_is_not(tmp_path: Path) -> None:
    """Tensor parallelism.  Durable saves go to storage without the agent; snapshots come back, and serve
    when all ranks of a node are killed, and when the other node vanishes."""
    options = Options(
        layout="tp", width=192, every={"memory": 1, "durable": 5}, memory={}, sigterm_s=None
    )
    with Cluster(2, tmp_path / "nodes", head=True) as cluster:
        a, b = cluster.nodes
        b.call(["fallocate", "-l", "255M", "/dev/shm/full"])
        told = Told(cluster, Story(cluster, tmp_path, options, nnodes="2:2", nproc=2))
        told.story.job.await_(
            lambda: told.story.newest([a])[0].of("save.committed"), "a durable save"
        )
        assert holdfast.steps(str(told.story.root))
        (first, *_) = told.story.newest([a])
        b.call(["rm", "/dev/shm/full"])
        told.commits(2)
        told.kill_ranks(b)
        told.commits(2)
        told.replace(a)
        told.story.end([a, b])
        check_nothing_left(told.story, [a, b])
    for chapter in told.chapters:
        check(told.story, *chapter)
    assert not first.of("snapshot.committed") and first.of("save.committed")
    assert any("No space left on device" in e["error"] for e in first.of("snapshot.failed"))
