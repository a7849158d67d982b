"""Elastic torchrun on four nodes: a rank dies, a node vanishes, a spare joins; training goes on.

All three happen to one job, one after the other, and all it has is the durable tier.  Its rendezvous is
on a head node that runs no ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast

from .cluster import Cluster, Node
from .elastic_train import EVERY
from .job import TOGETHER
from .story import Life, Story

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.usefixtures("needs_nodes"),
]
ON = 6
"""Steps to go on after each failure."""


class Run(Story):
    """The job, and the newest committed step before each failure."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        super().__init__(cluster, folder, nnodes="1:4", conf=TOGETHER)
        self.committed: list[int] = []

    def seen(self, nodes: list[Node], num_lives: int) -> None:
        """Wait until they have gone on; then look at storage."""
        self.go_on(nodes, num_lives, ON)
        self.committed.append(max(holdfast.steps(str(self.root)), default=0))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[Node]]:
    """The whole story; leaving the cluster asserts that nothing of it is left."""
    folder = tmp_path_factory.mktemp("elastic")
    with Cluster(4, folder / "nodes", head=True) as cluster:
        nodes = cluster.nodes
        run = Run(cluster, folder)
        run.seen(nodes, 1)
        nodes[2].signal(run.lives(nodes[2])[-1].start["pid"])
        run.seen(nodes, 2)
        nodes[0].kill()
        run.seen(nodes[1:], 3)
        run.join(cluster.add())
        run.seen(nodes[1:4], 4)
        run.end(nodes[1:], 10)
    return run, nodes


def check_restored(lives: list[Life], committed: int, last: int) -> int:
    """All ranks restored one step, saved no earlier than `committed` and not after `last`; that step."""
    (step,) = {life.start["restored"] for life in lives}
    assert committed <= step <= last
    assert step % EVERY == 0
    return step


def test_a_killed_rank_leaves_no_trace(told: tuple[Run, list[Node]]) -> None:
    """Before and after: every step of every rank is the reference's, bit for bit."""
    run, nodes = told
    lives = [run.lives(node)[:2] for node in nodes[:4]]
    last = min(first.last for first, _ in lives)
    step = check_restored([second for _, second in lives], run.committed[0], last)
    reference = run.reference(max(life.last for of in lives for life in of), num_ranks=4)
    for first, second in lives:
        assert first.start["world"] == second.start["world"] == 4
        assert second.start["digest"] == reference[step]["digest"]
        for life in (first, second):
            assert life.steps
            assert all(life.steps[n]["digest"] == reference[n]["digest"] for n in life.steps)


def test_three_nodes_go_on_where_four_were(told: tuple[Run, list[Node]]) -> None:
    """The node of rank 0 vanished: what was saved by four is restored by three, bit for bit."""
    run, nodes = told
    lives = [run.lives(node) for node in nodes[1:4]]
    last = min(of[1].last for of in lives)
    step = check_restored([of[2] for of in lives], run.committed[1], last)
    reference = run.reference(step + ON, num_ranks=4)
    for of in lives:
        assert of[2].start["world"] == 3
        assert of[2].start["digest"] == reference[step]["digest"]
        shared = of[2].steps.keys() & reference.keys()
        assert shared
        for n in shared:
            assert of[2].steps[n]["loss"] == pytest.approx(reference[n]["loss"], rel=1e-4)


def test_a_spare_joins_and_no_step_is_lost(told: tuple[Run, list[Node]]) -> None:
    """torchrun stops the ranks by SIGTERM, so they save the step that they have reached."""
    run, nodes = told
    before = [run.lives(node)[2] for node in nodes[1:4]]
    after = [run.lives(node)[-1] for node in nodes[1:5]]
    (step,) = {life.start["restored"] for life in after}
    assert {life.last for life in before} == {step}
    for life in after:
        assert life.start["world"] == 4
        assert life.start["digest"] == before[0].steps[step]["digest"]
        assert life.last > step
    assert {life.last for life in after} == {int((run.logs / "end").read_text())}
