"""Random faults on one long training, seeded: the same seed draws the same faults at the same moments.

After each, the ranks must go on from the newest step that the scheme promises, or a newer one, bit for bit.
What it promises follows from which snapshots were complete, on which nodes, and which of these are lost.
"""

from __future__ import annotations

import random
import time

import holdfast
from holdfast.policy.redundancy import fitting, groups
from holdfast.policy.survival import rs, survives

from .cluster import Node
from .elastic_train import Options
from .story import Life
from .told import Told, check

OPTIONS = Options(
    width=192,
    every={"memory": 1, "durable": 25},
    memory={"redundancy": "rs(2)", "bandwidth": "2MB"},
    sigterm_s=None,
)
FAULTS = (
    "rank", "agent", "agent in mid-snapshot", "agent in mid-parity", "node", "node with a slow peer",
    "two nodes", "cut", "slow peer", "rank and agent",
)  # fmt: skip
MOST_S = 1.5
"""A fault comes at most so long after training went on."""


class Chaos:
    """Faults, one after the other, on four nodes.  `lines` tells what was done and what came of it."""

    def __init__(self, told: Told, seed: int) -> None:
        self.told, self.draw = told, random.Random(seed)
        self.lines: list[str] = []
        self._boots = dict.fromkeys(told.here, 0)
        self._complete: dict[int, tuple[tuple[Node, int], ...]] = {}
        """By step: where its snapshot is, node and number of its boot, in the order of ranks."""

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

    def _do(self, fault: str, nodes: list[Node]) -> str:
        told, story, (one, other) = self.told, self.told.story, nodes
        lost: list[Node] = []
        match fault:
            case "rank":
                told.kill_ranks(one)
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
        return self._went_on(lost)

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

    def _went_on(self, lost: list[Node]) -> str:
        """After a restart: check it against what was promised."""
        before, after, kept = self.told.chapters[-1]
        self._note(kept)
        for node in lost:
            self._boots[node] += 1
        promised = max(filter(self._is_kept, self._complete), default=0)
        durable = max(holdfast.steps(str(self.told.story.root)), default=0)
        (step,) = {life.start["restored"] for life in after}
        assert step >= promised, f"step {step} restored, {promised} promised"
        if step > durable or promised > durable:
            check(self.told.story, before, after, [], promised=promised)
        self._complete = {s: where for s, where in self._complete.items() if s <= step}
        return f"restored {step}, promised {promised}, of {max(life.last for life in before)},"

    def _note(self, kept: list[Life]) -> None:
        """Snapshots that a rank whose node is still there knew to be complete."""
        where = tuple(
            (node, self._boots[node]) for node in sorted(self.told.here, key=lambda n: n.address)
        )
        for life in kept:
            self._complete.update(dict.fromkeys(life.committed, where))
            newest = sorted(self._complete)[-2:]  # older ones have given way
            self._complete = {s: self._complete[s] for s in newest}

    def _is_kept(self, step: int) -> bool:
        where = self._complete[step]
        names = [node.name for node, _ in where]
        scheme = fitting(rs(2), names)
        lost = {i for i, (node, boot) in enumerate(where) if self._boots[node] != boot}
        return survives(scheme, groups(names, scheme), lost)
