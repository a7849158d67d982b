"""A job on the memory tier as it is told: chapters of failures, and what must hold after each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from .cluster import Cluster, Node
from .story import Life, Story

ON = 5
"""Steps to go on after each failure."""


def check(
    story: Story,
    before: list[Life],
    after: list[Life],
    kept: list[Life],
    promised: int | None = None,
) -> int:
    """All ranks restored the newest step that was complete, from memory, and go on as they should.

    `before`: the lives that ended; `kept`: those of them whose nodes are still there.  The step.
    """
    (step,) = {life.start["restored"] for life in after}
    if promised is None:
        promised = max(s for life in kept for s in (life.start["restored"], *life.committed))
    assert promised <= step <= max(life.last for life in before)
    written_down = [life.steps[step] for life in before if step in life.steps]
    written_down += [life.start for life in before if life.start["restored"] == step]
    (written,) = {one["digest"] for one in written_down}
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

    def await_asked(self, node: Node) -> None:
        """A snapshot is under way, and the agent there does not answer."""

        since = time.time()

        def asked() -> bool:
            (life,) = self.story.newest([node])
            done = (*life.of("snapshot.committed"), *life.of("snapshot.failed"))
            called = [e["time"] for e in life.of("snapshot.copy") if e["time"] > since - 1.0]
            return bool(called) and time.time() - max([since, *(e["time"] for e in done)]) > 1.0

        self.story.job.await_(asked, "a snapshot that waits", 20)

    def await_parity(self, node: Node) -> None:
        self.story.job.await_(lambda: self.filling(node, "guard"), "parity being made", 20)

    def filling(self, node: Node, kind: str) -> bool:
        found = [s for s in self.story.slots(node) if s["kind"] == kind]
        return any(s["phase"] == "filling" for s in found)

    def lose(self, *lost: Node, meanwhile: Callable[[], None] | None = None) -> None:
        """These nodes vanish; `meanwhile` is done before the others go on."""
        before, there = self.story.newest(self.here), self.here
        for node in lost:
            node.kill()
        self.here = [node for node in there if node not in lost]
        if meanwhile is not None:
            meanwhile()
        self._next(before, there)

    def replace(self, *nodes: Node) -> None:
        """Nodes vanish and come back without memory."""
        before = self.story.newest(self.here)
        for node in nodes:
            node.kill()
        for node in nodes:
            node.boot()
            self.story.join(node)
        self._next(before, self.here, lost=nodes)

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
