"""Elastic torchrun with snapshots in memory: whatever is lost, training goes on from the newest kept.

Three jobs, each with one failure after the other: four nodes with a rank each, which become three, five,
three and two; and two nodes with two ranks each, under HSDP and under tensor parallelism.  After each
failure all ranks must have restored one step, no older than the newest that was complete, bit for bit,
without a byte from storage; and the steps that follow must be those of the same ranks without holdfast.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

import holdfast

from .cluster import Cluster, Node
from .elastic_train import Options
from .story import Life, Story

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.usefixtures("needs_nodes"),
]
ON = 5
"""Steps to go on after each failure."""
SEVERAL = Options(
    width=192,
    every={"memory": 1, "durable": 1000},
    memory={"redundancy": "rs(2)", "bandwidth": "2MB"},
)
"""Images of 300 kB; what protects them is under way for a third of a second."""


def check(story: Story, before: list[Life], after: list[Life], kept: list[Life]) -> int:
    """All ranks restored the newest step that was complete, from memory, and go on as they should.

    `before`: the lives that ended; `kept`: those of them whose nodes are still there.  The step.
    """
    (step,) = {life.start["restored"] for life in after}
    promised = max(s for life in kept for s in (life.start["restored"], *life.committed))
    assert promised <= step <= max(life.last for life in before)
    (written,) = {life.steps[step]["digest"] for life in before if step in life.steps}
    for life in after:
        assert life.start["digest"] == written
        assert life.moved("all") <= sum(map(life.moved, ("local", "peer", "rebuilt")))
        assert not life.of("memory.from_storage")
        for tried in life.start["tried"]:
            assert life.steps[tried["step"]]["digest"] == tried["digest"]
            assert life.steps[tried["step"]]["loss"] == tried["loss"]
        assert not life.of("restore.passed_over")
    assert sum(life.moved("all") for life in after) > 0
    return step


def check_nothing_left(story: Story, nodes: list[Node]) -> None:
    """The run has ended well: no snapshot is kept, and no process runs but the agents."""
    for node in nodes:
        assert story.segments(node) == []
        story.job.await_(
            lambda: names(story, node) <= {"sh", "cat"}, "the end of all processes", 10
        )


def names(story: Story, node: Node) -> set[str]:
    """Of the programs there, but for the agent: those that keep the node are `sh` and `cat`."""
    agent = story.agent(node)
    pids = {there: here for there, here in node.processes().items() if there != agent}
    found = set()
    for pid in pids.values():
        with suppress(OSError):  # it has just ended
            found.add(Path(f"/proc/{pid}/comm").read_text().strip())
    return found


class Told:
    """A story as it is told: which nodes take part, and which lives there were, chapter by chapter."""

    def __init__(self, cluster: Cluster, story: Story) -> None:
        self.cluster, self.story = cluster, story
        self.here = [node for node in cluster.nodes if node.alive]
        self.chapters: list[tuple[list[Life], list[Life], list[Life]]] = []
        """Lives that ended, those that followed, and the ended ones whose nodes are still there."""
        story.go_on(self.here, 1, ON)

    def commits(self, more: int = 2) -> None:
        """Wait until every rank knows of so many more complete snapshots."""
        counts = [len(life.committed) for life in self.story.newest(self.here)]

        def on() -> bool:
            now = [len(life.committed) for life in self.story.newest(self.here)]
            return all(n >= old + more for n, old in zip(now, counts))

        self.story.job.await_(on, "snapshots", 20)

    def lose(self, *lost: Node, meanwhile: Callable[[], None] | None = None) -> None:
        """These nodes vanish; `meanwhile` is done before the others go on."""
        before, there = self.story.newest(self.here), self.here
        for node in lost:
            node.kill()
        self.here = [node for node in there if node not in lost]
        if meanwhile is not None:
            meanwhile()
        self._next(before, there)

    def replace(self, node: Node) -> None:
        """A node vanishes and comes back without memory."""
        before = self.story.newest(self.here)
        node.kill()
        node.boot()
        self.story.join(node)
        self._next(before, self.here, lost=[node])

    def kill_ranks(self, node: Node) -> None:
        """All ranks of a node get SIGKILL."""
        before = self.story.newest(self.here)
        for life in self.story.newest([node]):
            node.signal(life.start["pid"])
        self._next(before, self.here)

    def add(self, number: int) -> None:
        """Spares join."""
        before, there = self.story.newest(self.here), self.here
        new = [self.cluster.add() for _ in range(number)]
        for node in new:
            self.story.join(node)
        self.here = [*there, *new]
        self._next(before, there)

    def _next(self, before: list[Life], there: list[Node], lost: Sequence[Node] = ()) -> None:
        """Wait for the next life of all nodes that are here now."""
        world = len(self.here) * self.story.nproc
        old = {life.key for life in before}

        def on() -> bool:
            lives = self.story.newest(self.here)
            return all(
                life.key not in old
                and life.begun
                and life.start["world"] == world
                and life.last >= life.start["restored"] + ON
                for life in lives
            )

        self.story.job.await_(on, f"a life of {world} ranks")
        stay = [node for node in there if node in self.here and node not in lost]
        ended = [life for node in there for life in self.story.all_lives(node)]
        assert all(life.begun for life in ended)  # none failed while it restored
        kept = [life for node in stay for life in self.story.all_lives(node)]
        self.chapters.append(
            (
                [life for life in ended if life.key in old],
                self.story.newest(self.here),
                [life for life in kept if life.key in old],
            )
        )


# -- four nodes -----------------------------------------------------------------------------------


class Four(Told):
    """Agents die and links fail, which no rank need notice; then nodes come and go."""

    def agents_die(self) -> None:
        """One at any time, one in mid-snapshot, one in mid-parity; nobody restarts."""
        story, nodes = self.story, self.here
        story.kill_agent(nodes[1])
        self.commits()
        story.stop_agent(nodes[2])
        self._await_asked(nodes[2])
        story.kill_agent(nodes[2])
        self.commits()
        self._await_parity(nodes[3])
        story.kill_agent(nodes[3])
        assert self._filling(nodes[3], "guard")
        self.commits()

    def _await_asked(self, node: Node) -> None:
        """A snapshot is under way, and the agent there does not answer."""

        def asked() -> bool:
            (life,) = self.story.newest([node])
            called = [e for e in life.events if e["event"] == "snapshot.call"][-1]
            return called["step"] not in life.committed and time.time() - called["time"] > 0.5

        self.story.job.await_(asked, "a snapshot that waits", 20)

    def _await_parity(self, node: Node) -> None:
        self.story.job.await_(lambda: self._filling(node, "guard"), "parity being made", 20)

    def _filling(self, node: Node, kind: str) -> bool:
        found = [s for s in self.story.slots(node) if s["kind"] == kind]
        return any(s["phase"] == "filling" for s in found)

    def links_fail(self) -> None:
        """Cut for a second, then slow; nobody restarts."""
        self.here[1].cut()
        time.sleep(1)
        self.here[1].join()
        self.commits()
        self.here[2].slow("8mbit")
        self.commits()
        self.here[2].normal()

    def lose_while(self, lost: Node, other: Node) -> None:
        """A node vanishes, and the agent of another dies while the ranks rebuild what the first held."""
        counts = {node: len(self.story.lives(node)) for node in self.here}

        def rebuilding() -> bool:
            lives = [(self.story.lives(node), counts[node]) for node in self.here]
            return any(of[-1].of("memory.rebuilt") for of, old in lives if len(of) > old)

        def kill() -> None:
            self.story.job.await_(rebuilding, "an image being rebuilt")
            self.story.kill_agent(other)
            assert not any(life.begun for life in self.story.newest(self.here))
            other.normal()

        other.slow("4mbit")
        self.lose(lost, meanwhile=kill)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Four]:
    """The whole story; leaving the cluster asserts that no process or namespace is left."""
    folder = tmp_path_factory.mktemp("four")
    with Cluster(4, folder / "nodes", head=True) as cluster:
        nodes = cluster.nodes
        told = Four(cluster, Story(cluster, folder, SEVERAL, nnodes="1:5"))
        told.agents_die()
        told.links_fail()
        told.lose_while(nodes[0], nodes[1])
        told.add(2)
        told.lose(nodes[1], nodes[4])
        told.lose(nodes[2])
        told.story.end(told.here)
        check_nothing_left(told.story, told.here)
        yield told


def test_agents_die_and_links_fail_and_training_goes_on(four: Four) -> None:
    """In one life: whatever snapshots failed, no step differs from the training without holdfast."""
    before, _, _ = four.chapters[0]
    reference = four.story.reference()
    for life in before:
        shared = life.steps.keys() & reference.keys()
        assert len(shared) > 4 * ON
        assert all(life.steps[n]["digest"] == reference[n]["digest"] for n in shared)
        assert life.of("snapshot.failed")


def test_three_of_four_nodes_go_on(four: Four) -> None:
    """While they rebuild what the fourth held, an agent dies."""
    before, after, kept = four.chapters[0]
    check(four.story, before, after, kept)
    assert sum(life.moved("rebuilt") for life in after) > 0


def test_five_nodes_go_on_where_three_were(four: Four) -> None:
    """torchrun stops the three by SIGTERM: no step is lost, and storage is not read."""
    before, after, kept = four.chapters[1]
    assert check(four.story, before, after, kept) == max(life.last for life in before)


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
        assert life.committed[-1] == life.last


# -- two ranks per node ---------------------------------------------------------------------------


def test_two_ranks_of_a_node_share_an_agent(tmp_path: Path) -> None:
    """HSDP.  The agent dies and both go on with the next; both are killed; then a node vanishes."""
    options = Options(layout="hsdp", every={"memory": 1, "durable": 1000}, memory={})
    with Cluster(2, tmp_path / "nodes", head=True) as cluster:
        told = Told(cluster, Story(cluster, tmp_path, options, nnodes="2:2", nproc=2))
        a, b = cluster.nodes
        told.story.kill_agent(b)
        told.commits(3)
        told.kill_ranks(b)
        told.replace(a)
        told.story.end([a, b])
        check_nothing_left(told.story, [a, b])
    for chapter in told.chapters:
        check(told.story, *chapter)
    first, _, _ = told.chapters[0]
    reference = told.story.reference()
    assert all(x.steps[n]["digest"] == reference[n]["digest"] for x in first for n in x.steps)
    assert sum(life.moved("rebuilt") for life in told.chapters[1][1]) > 0


def test_memory_is_full_and_then_it_is_not(tmp_path: Path) -> None:
    """Tensor parallelism.  Durable saves go to storage without the agent; snapshots come back."""
    options = Options(layout="tp", width=192, every={"memory": 1, "durable": 5}, memory={})
    with Cluster(2, tmp_path / "nodes", head=True) as cluster:
        a, b = cluster.nodes
        b.call(["fallocate", "-l", "255M", "/dev/shm/full"])
        told = Told(cluster, Story(cluster, tmp_path, options, nnodes="2:2", nproc=2))
        told.story.job.await_(lambda: holdfast.steps(str(told.story.root)), "a durable save")
        (first, *_) = told.story.newest([a])
        b.call(["rm", "/dev/shm/full"])
        told.commits(2)
        told.replace(a)
        told.story.end([a, b])
        check_nothing_left(told.story, [a, b])
    check(told.story, *told.chapters[0])
    assert not first.of("snapshot.committed") and first.of("save.committed")
    assert any("No space left on device" in e["error"] for e in first.of("snapshot.failed"))
