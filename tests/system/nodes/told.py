"""A job on the memory tier as it is told: chapters of failures, and what must hold after each."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from .cluster import Cluster, Node
from .story import HOME, Life, Story

ON = 5
"""Steps to go on after each failure."""
KEEPERS = {"sh", "cat"}
"""The programs that keep a node."""
IMAGE = re.compile(r"(share|guard)-\d+-\d+")


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
        assert not life.of("memory.from_storage") and not life.moved("storage")
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
        story.job.await_(lambda: names(story, node) <= KEEPERS, "the end of all processes", 120)


def check_slots(story: Story, nodes: list[Node]) -> None:
    """While training goes on, nothing is kept that nobody will use: of each kind and rank the newest
    snapshot, the one that is being filled, and one that is read for storage."""
    for node in nodes:
        held = Counter((s["kind"], s["rank"]) for s in story.slots(node))
        assert max(held.values(), default=0) <= 3, (node.name, held)
        files = {name for name in story.segments(node) if IMAGE.fullmatch(name)}
        headers = {f"{s['name']}" for s in story.slots(node)}
        assert len(files - headers) <= 1, (node.name, files - headers)  # one may be in the making


def names(story: Story, node: Node) -> set[str]:
    """Of the programs there, but for the agent."""
    agent = story.agent(node)
    pids = [here for there, here in node.processes().items() if there != agent]
    return {comm(pid) for pid in pids} - {""}


def comm(pid: int) -> str:
    """The name of a process; empty if it has just ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


class Told:
    """A story as it is told: which nodes take part, and which lives there were, chapter by chapter."""

    def __init__(self, cluster: Cluster, story: Story) -> None:
        self.cluster, self.story = cluster, story
        self.here = [node for node in cluster.nodes if node.alive]
        self.chapters: list[tuple[list[Life], list[Life], list[Life]]] = []
        """Lives that ended, those that followed, and the ended ones whose nodes are still there."""
        self._known: set[tuple[float, int]] = set()
        """The lives that there were before the failure."""
        story.go_on(self.here, 1, ON)

    def commits(self, more: int = 2) -> None:
        """Wait until every rank knows of so many more complete snapshots."""
        counts = [len(life.committed) for life in self.story.newest(self.here)]

        def on() -> bool:
            now = [len(life.committed) for life in self.story.newest(self.here)]
            return all(n >= old + more for n, old in zip(now, counts))

        self.story.job.await_(on, "snapshots")

    def await_asked(self, node: Node) -> None:
        """A snapshot is under way, and the agent there does not answer."""

        since = time.time()

        def asked() -> bool:
            (life,) = self.story.newest([node])
            kinds = ("snapshot.committed", "snapshot.failed", "save.committed", "save.failed")
            ends = [e for kind in kinds for e in life.of(kind)]
            done = max((e["time"] for e in ends), default=0.0)
            begun = any(e["time"] > done for e in life.of("snapshot.call"))
            return begun and time.time() - max(since, done) > 1.0

        self.story.job.await_(asked, "a snapshot that waits", 120)

    def await_parity(self, node: Node) -> None:
        self.story.job.await_(lambda: self.filling(node, "guard"), "parity being made", 120)

    def filling(self, node: Node, kind: str) -> bool:
        found = [s for s in self.story.slots(node) if s["kind"] == kind]
        return any(s["phase"] == "filling" for s in found)

    def _before(self) -> tuple[list[Life], list[Node]]:
        """The last lives of all ranks, and where they are; of no node there is a later one."""
        self._known = {
            life.key for node in self.cluster.nodes for life in self.story.all_lives(node)
        }
        return self.story.newest(self.here), self.here

    def lose(self, *lost: Node, meanwhile: Callable[[], None] | None = None) -> None:
        """These nodes vanish; `meanwhile` is done before the others go on."""
        before, there = self._before()
        for node in lost:
            node.kill()
        self.here = [node for node in there if node not in lost]
        if meanwhile is not None:
            meanwhile()
        self._next(before, there)

    def replace(
        self,
        *nodes: Node,
        booted: Callable[[Node], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Nodes vanish and come back without memory.

        `booted` is done to each before it takes part; `meanwhile`, before training goes on.
        """
        before, there = self._before()
        for node in nodes:
            node.kill()
        for node in nodes:
            node.boot()
            if booted is not None:
                booted(node)
            self.story.join(node)
        if meanwhile is not None:
            meanwhile()
        self._next(before, there, lost=nodes)

    def kill_ranks(self, node: Node, meanwhile: Callable[[], None] | None = None) -> None:
        """All ranks of a node get SIGKILL; `meanwhile` is done before the others go on."""
        before, there = self._before()
        for life in self.story.newest([node]):
            node.signal(life.start["pid"])
        if meanwhile is not None:
            meanwhile()
        self._next(before, there)

    def kill_rank(self, node: Node, local: int = 0) -> None:
        """One rank of a node gets SIGKILL."""
        before, there = self._before()
        node.signal(self.story.newest([node])[local].start["pid"])
        self._next(before, there)

    def kill_agent_in_rebuild(self, other: Node, *, of: Callable[..., None], lost: Node) -> None:
        """A node vanishes (by `lose` or `replace`), and the agent of another dies while ranks rebuild what
        the first held."""

        def rebuilding() -> bool:
            lives = [x for node in self.cluster.nodes for x in self.story.all_lives(node)]
            return any(x.of("memory.rebuilt") for x in lives if x.key not in self._known)

        def kill() -> None:
            self.story.job.await_(rebuilding, "an image being rebuilt")
            self.story.kill_agent(other)
            assert any(life.key in self._known or not life.begun for life in self._latest())
            other.normal()

        other.slow("4mbit")
        of(lost, meanwhile=kill)

    def _latest(self) -> list[Life]:
        return self.story.newest(self.here)

    def damage(self, node: Node, kind: str, but_every: int = 1000) -> Callable[[], None]:
        """`flip` some, at a moment from which on all ranks stand still: no newer snapshot replaces what is
        damaged.  What is returned lets those go on that are still there."""
        while True:
            pids = [(n, life.start["pid"]) for n in self.here for life in self.story.newest([n])]
            self._signal(pids, signal.SIGSTOP)
            if self.flip(node, kind, but_every):
                return lambda: self._signal(pids, signal.SIGCONT)
            self._signal(pids, signal.SIGCONT)
            time.sleep(0.2)

    def _signal(self, pids: list[tuple[Node, int]], number: int) -> None:
        """To processes that may have ended, on nodes that may be no more."""
        for node, pid in pids:
            if node.alive:
                with suppress(KeyError, ProcessLookupError):
                    node.signal(pid, number)

    def flip(self, node: Node, kind: str, but_every: int) -> int:
        """One bit of each image there of that kind (`share`, `guard`) is another; of how many.

        Steps that are multiples of `but_every` may be on their way to storage: not of them.
        """
        ready = [s for s in self.story.slots(node) if s["kind"] == kind and s["phase"] == "ready"]
        found = [s for s in ready if s["step"] % but_every]
        for slot in found:
            (path,) = node.path(f"{HOME}/jobs").glob(f"*/{slot['name']}")
            with path.open("r+b") as file:
                file.seek(slot["bytes"] // 3)
                byte = file.read(1)[0]
                file.seek(slot["bytes"] // 3)
                file.write(bytes([byte ^ 16]))
        return len(found)

    def restart(self, nodes: list[Node]) -> None:
        """All processes of the job are killed on all its nodes, and it is started again on these."""
        before, there = self._before()
        for node in there:
            agent = self.story.agent(node)
            for number, pid in node.processes().items():
                if number not in (1, agent) and comm(pid) not in KEEPERS:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        self.here = nodes
        self.story.start(nodes)
        self._next(before, there)

    def add(self, number: int) -> None:
        """Spares join."""
        before, there = self._before()
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
                life.key not in self._known
                and life.begun
                and life.start["world"] == world
                and life.last >= life.start["restored"] + ON
                for life in lives
            )

        self.story.job.await_(on, f"a life of {world} ranks")
        stay = [node for node in there if node in self.here and node not in lost]
        ended = [life for node in there for life in self.story.all_lives(node)]
        worlds = {world, *(life.start.get("world") for life in before)}
        failed = [life for life in ended if not life.begun and life.start["world"] in worlds]
        assert not failed, (
            failed
        )  # while it restored; of another world, it was too early for others
        kept = [life for node in stay for life in self.story.all_lives(node)]
        self.chapters.append(
            (
                [life for life in ended if life.key in old],
                self.story.newest(self.here),
                [life for life in kept if life.key in old],
            )
        )
