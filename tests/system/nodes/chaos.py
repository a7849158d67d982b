"""Random faults on one long training, seeded: the same seed draws the same faults at the same moments.

After each, the ranks must go on from the newest step that the scheme promises, or a newer one, bit for bit.
What it promises follows from which snapshots were complete, on which nodes, and which of these are lost.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter

import holdfast
from holdfast.policy.redundancy import fitting, parity_groups
from holdfast.policy.survival import rs, survives

from .cluster import Node
from .elastic_train import Options
from .story import Life
from .told import ON, Told, check, check_slots

OPTIONS = Options(
    width=192,
    every={"memory": 1, "durable": 25},
    memory={"redundancy": "rs(2)", "bandwidth": "2MB"},
    sigterm_s=None,
)
FAULTS = (
    "rank", "agent", "agent in mid-snapshot", "agent in mid-parity", "agent in mid-rebuild", "node",
    "node with a slow peer", "two nodes", "cut", "slow peer", "rank and agent", "bit in a segment",
    "bit in a guard", "memory full", "other nodes",
)  # fmt: skip
COUNTS = (2, 3, 4, 5)
"""Of nodes, that a job may be started again on."""
FULL = "/dev/shm/full"
MOST_S = 1.5
"""A fault comes at most so long after training went on."""
MORE_FILES = 6
"""Open in a rank, than in its first steps: connections."""
MORE_OF_AGENTS = 12
"""Open in an agent, than at the first look at it: connections with up to three nodes more, and an image
and what it is written to.  Connections of a node that vanished are closed after a minute."""


class Chaos:
    """Faults, one after the other, on four nodes at first.  `lines` tells what was done and what came of
    it."""

    def __init__(self, told: Told, seed: int) -> None:
        self.told, self.draw = told, random.Random(seed)
        self.lines: list[str] = []
        self._boots: Counter[Node] = Counter()
        self._complete: dict[int, tuple[tuple[Node, int], ...]] = {}
        """By step: where its snapshot is, node and number of its boot, in the order of ranks."""
        self._files: dict[tuple[str, int], int] = {}
        """Open at the first look, by node and process of an agent."""
        self._durable = 0

    def run(self, num_faults: int) -> None:
        for number in range(num_faults):
            fault = self.draw.choice(FAULTS)
            nodes = self.draw.sample(self.told.here, 2)
            time.sleep(self.draw.uniform(0.0, MOST_S))
            began = time.monotonic()
            step = self._do(fault, nodes)
            took = time.monotonic() - began
            names = ", ".join(node.name for node in nodes)
            self.lines.append(f"{number} {fault} ({names}): {step} after {took:.1f} s")
            print(self.lines[-1], flush=True)
            self._look_for_leaks()

    def _look_for_leaks(self) -> None:
        """When some more snapshots are complete: nothing has become more."""
        self.told.commits(2)
        check_slots(self.told.story, self.told.here)
        for node in self.told.here:
            agent = node.processes()[self.told.story.agent(node)]
            first = self._files.setdefault((node.name, agent), files(agent))
            self.told.story.job.await_(
                lambda: files(agent) <= first + MORE_OF_AGENTS,
                f"no more open in the agent of {node.name} than {first} and some",
                90,
            )

    def _do(self, fault: str, nodes: list[Node]) -> str:
        told, story, (one, other) = self.told, self.told.story, nodes
        team, lost, damaged = self.told.here, list[Node](), list[Node]()
        self._durable = max(holdfast.steps(str(story.root)), default=0)
        match fault:
            case "rank":
                told.kill_ranks(one)
            case "other nodes":
                told.restart(self._other_nodes())
            case "bit in a segment":
                told.kill_ranks(other, told.damage(one, "share", OPTIONS.every["durable"]))
            case "bit in a guard":
                lost, damaged = [one], [other]
                go_on = told.damage(other, "guard", OPTIONS.every["durable"])
                told.replace(one, booted=lambda _: go_on())
            case "memory full":
                lost = [one]
                told.replace(one, booted=fill)
                one.call(["rm", FULL])
            case "agent in mid-rebuild":
                lost = [one]
                told.commits(1)
                told.kill_agent_in_rebuild(other, of=told.replace, lost=one)
            case "rank and agent":
                story.kill_agent(other)
                told.kill_ranks(one)
            case "node":
                lost = [one]
                told.replace(one)
            case "node with a slow peer":
                lost = [one]
                other.slow("8mbit")
                told.replace(one)
                other.normal()
            case "two nodes":
                lost = nodes
                told.replace(one, other)
            case _:
                self._disturb(fault, one)
                told.commits(1)
                return "went on"
        return self._went_on(team, lost, damaged)

    def _other_nodes(self) -> list[Node]:
        """Fewer of those that are part of the job, or these and others."""
        told = self.told
        count = self.draw.choice([n for n in COUNTS if n != len(told.here)])
        spare = [node for node in told.cluster.nodes if node not in told.here]
        while len(told.here) + len(spare) < count:
            spare.append(told.cluster.add())
            told.story.impatient(spare[-1])
        if count < len(told.here):
            return self.draw.sample(told.here, count)
        return told.here + self.draw.sample(spare, count - len(told.here))

    def _disturb(self, fault: str, node: Node) -> None:
        """What no rank need notice."""
        told, story = self.told, self.told.story
        match fault:
            case "agent":
                story.kill_agent(node)
            case "agent in mid-snapshot":
                story.stop_agent(node)
                told.await_asked(node)
                story.kill_agent(node)
            case "agent in mid-parity":
                told.await_parity(node)
                story.kill_agent(node)
            case "cut":
                node.cut()
                time.sleep(1.0)
                node.join()
            case "slow peer":
                node.slow("8mbit")
                told.commits(1)
                node.normal()

    def _went_on(self, team: list[Node], lost: list[Node], damaged: list[Node]) -> str:
        """After a restart: check it against what was promised.

        `damaged`: nodes whose part in what protects the lost ones cannot be used; of two nodes that is all
        there is.
        """
        before, after, kept = self.told.chapters[-1]
        self._note(team, kept)
        for node in lost:
            self._boots[node] += 1
        promised = max((s for s in self._complete if self._is_kept(s, damaged)), default=0)
        durable = max(holdfast.steps(str(self.told.story.root)), default=0)
        (step,) = {life.start["restored"] for life in after}
        assert step >= promised, f"step {step} restored, {promised} promised"
        assert step >= self._durable, f"step {step} restored, {self._durable} in storage"
        if step > durable or promised > durable:
            check(self.told.story, before, after, [], promised=promised)
        self._complete = {s: where for s, where in self._complete.items() if s <= step}
        if team != self.told.here:  # until they have one of their own, it is with others, too
            self._complete = {}
        check_files(before)
        return f"restored {step}, promised {promised}, of {max(life.last for life in before)},"

    def _note(self, team: list[Node], kept: list[Life]) -> None:
        """Snapshots that a rank whose node is still there knew to be complete."""
        where = tuple((node, self._boots[node]) for node in sorted(team, key=lambda n: n.address))
        for life in kept:
            self._complete.update(dict.fromkeys(life.committed, where))
            newest = sorted(self._complete)[-2:]  # older ones have given way
            self._complete = {s: self._complete[s] for s in newest}

    def _is_kept(self, step: int, damaged: list[Node]) -> bool:
        where = self._complete[step]
        names = [node.name for node, _ in where]
        scheme = fitting(rs(2), names)
        lost = {
            i
            for i, (node, boot) in enumerate(where)
            if self._boots[node] != boot or node in damaged
        }
        return survives(scheme, parity_groups(names, scheme), lost)


def check_files(lives: list[Life]) -> None:
    """No process of a rank has more open than in its first steps, but for some connections."""
    for life in lives:
        seen = [life.steps[step]["files"] for step in sorted(life.steps)]
        assert max(seen[ON:], default=0) <= max(seen[:ON], default=0) + MORE_FILES, seen


def files(pid: int) -> int:
    """How many a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def fill(node: Node) -> None:
    """Nearly all memory of a node that has just been started is taken."""
    node.call(["fallocate", "-l", "255M", FULL])
