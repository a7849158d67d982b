"""`holdfast run` over nodes: what is lost is replaced or done without, and the others go on in place.

Whatever happens, and on however many ranks, each step has the state that it has in the uninterrupted run,
and no step that was snapshotted is done again.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from .cluster import Cluster
from .recover_train import Options
from .recovery import WHY_NO_ETCD, Life, Run, begin_etcd

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.soak,
    pytest.mark.usefixtures("needs_nodes"),
]


def begun(before: Sequence[Life], after: Sequence[Life]) -> int:
    """The step at which all began anew; none that was snapshotted before is lost."""
    (step,) = {life.start["begins"] for life in after}
    assert {life.start["tier"] for life in after} == {"memory"}
    assert step >= min(life.committed[-1] for life in before if life.committed)
    return int(step)


def pids(lives: Sequence[Life]) -> set[tuple[str, int]]:
    """Their processes, whose numbers are those of their nodes."""
    return {(life.start["host"], life.start["pid"]) for life in lives}


def gone(run: Run, before: Sequence[Life], after: Sequence[Life]) -> set[tuple[str, int]]:
    """Processes of `before` that are not in `after`, but for one that gloo has not woken: it is replaced,
    which the log says (decision 166)."""
    replaced = {
        (node.name, int(pid))
        for node, launcher in run.job.agents.items()
        for pids_told in re.findall(r"and nothing wakes them: ([\d, ]+)", launcher.text())
        for pid in pids_told.split(",")
    }
    assert len(replaced) <= 1, replaced
    return pids(before) - pids(after) - replaced


def test_a_rank_of_two_nodes_is_killed(tmp_path: Path) -> None:
    """The other node's ranks go on in their processes, and only the failed node pays a restart."""
    with Cluster(2, tmp_path / "nodes", head=True) as cluster:
        a, b = cluster.nodes
        run = Run(cluster, tmp_path, nnodes="2", nproc=2)
        before = run.on([a, b], 4)
        run.kill(a, 1)
        after = run.on([a, b], 4, after=time.time())
        run.end([a, b])
        run.check([a, b])
        begun(before, after)
        assert gone(run, before, after) == pids(before[1:2])
        assert "killed by SIGKILL" in run.job.agents[a].text()
        assert "rank 1 on node0 failed" in run.job.agents[b].text()


def test_a_rank_of_two_nodes_is_stopped(tmp_path: Path) -> None:
    """Those of both nodes wait for it, and both launchers see that no rank steps: it alone is replaced."""
    with Cluster(2, tmp_path / "nodes", head=True) as cluster:
        a, b = cluster.nodes
        run = Run(cluster, tmp_path, nnodes="2", nproc=2, words=["--hang-s=5"])
        before = run.on([a, b], 4)
        run.kill(b, 1, signal.SIGSTOP)
        after = run.on([a, b], 4, after=time.time())
        run.end([a, b])
        run.check([a, b])
        begun(before, after)
        assert pids(before[3:]) <= pids(before) - pids(after)
        assert gone(run, before, after) <= pids(before[3:])
        said = [run.job.agents[node].text() for node in (a, b)]
        assert any("no rank has done a step for 5 s" in text for text in said)
        assert all("attempt 2 begins with 4 ranks" in text for text in said)


def test_an_exception_on_one_node_is_no_failure_of_the_other(tmp_path: Path) -> None:
    """All processes go on; what the exception did to the ranks of the other node is of no account."""
    with Cluster(2, tmp_path / "nodes", head=True) as cluster:
        a, b = cluster.nodes
        run = Run(cluster, tmp_path, Options(fails_at="0:9"), nnodes="2")
        run.job.await_(lambda: "so the run ends" in run.job.agents[a].text(), "the end")
        assert run.job.agents[a].wait(300) == run.job.agents[b].wait(300) == 1
        assert "3rd time in the same way" in run.job.agents[a].text()
        said = run.job.agents[b].text()
        assert said.count("rank 0 on node0 failed after step 8: ValueError: a fault") == 3
        assert "the run has ended on another node" in said
        assert "holdfast run: rank 1" not in said
        assert len(pids(run.lives(a))) == len(pids(run.lives(b))) == 1
        run.check([a, b])


def test_a_standby_takes_the_place_of_a_node_whose_processes_are_gone(tmp_path: Path) -> None:
    with Cluster(4, tmp_path / "nodes", head=True) as cluster:
        *first, standby = cluster.nodes
        run = Run(cluster, tmp_path, nnodes="2:3", nodes=first)
        before = run.on(first, 3)
        run.join(standby)
        run.job.await_(lambda: "this node waits" in run.job.agents[standby].text(), "a standby")
        run.kill_all(first[1])
        left = [first[0], first[2], standby]
        after = run.on(left, 3, after=time.time())
        run.end(left)
        run.check([*left, first[1]])
        begun(before, after)
        assert gone(run, before, after) == pids(before[1:2])
        assert "attempt 2 begins with 3 ranks" in run.job.agents[first[0]].text()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("how", ["vanishes", "is cut off"])
def test_a_standby_takes_the_place_of_a_node_that(how: str, size: int, tmp_path: Path) -> None:
    """Nothing tells the others but that its signs of life are missing."""
    with Cluster(size + 1, tmp_path / "nodes", head=True) as cluster:
        lost, *others = cluster.nodes
        standby = others.pop()
        run = Run(cluster, tmp_path, nnodes=f"1:{size}", nodes=[lost, *others])
        before = run.on([lost, *others], size)
        run.join(standby)
        run.job.await_(lambda: "this node waits" in run.job.agents[standby].text(), "a standby")
        if how == "vanishes":
            lost.kill()
            run.job.agents.pop(lost)
        else:
            lost.cut()
        left = [*others, standby]
        after = run.on(left, size, after=time.time())
        if how == "is cut off":
            lost.join()  # it waits from now on, and ends with the run
        run.end(left)
        run.check([lost, *left])
        begun(before, after)
        assert not gone(run, before[1:], after)


def test_a_node_vanishes_and_comes_back(tmp_path: Path) -> None:
    """Three of four go on; the fourth is taken in at a snapshot."""
    with Cluster(4, tmp_path / "nodes", head=True) as cluster:
        nodes = cluster.nodes
        run = Run(cluster, tmp_path, nnodes="2:4")
        before = run.on(nodes, 4)
        nodes[0].kill()
        three = run.on(nodes[1:], 3, after=time.time())
        begun(before, three)
        nodes[0].boot()
        at = time.time()
        run.join(nodes[0])
        four = run.on(nodes, 4, after=at)
        begun([life for n in nodes[1:] for life in run.lives(n)[-2:-1]], four)
        run.end(nodes)
        run.check(nodes)
        assert not gone(run, before[1:], four[1:])


def test_a_node_that_was_cut_off_joins_again(tmp_path: Path) -> None:
    """It was struck off, and the others went on: its ranks leave the group that is no more.

    It has rank 0, which commits, and reaches the root all the time: whatever is saved there is right.
    """
    with Cluster(3, tmp_path / "nodes", head=True) as cluster:
        nodes = cluster.nodes
        run = Run(cluster, tmp_path, Options(durable=2), nnodes="2:3")
        before = run.on(nodes, 3)
        nodes[0].cut()
        two = run.on(nodes[1:], 2, after=time.time())
        begun(before, two)
        at = time.time()
        nodes[0].join()
        three = run.on(nodes, 3, after=at)
        begun(two, three)
        run.end(nodes)
        run.check(nodes)
        run.check_saved()
        assert not gone(run, before, three)


def test_the_launcher_that_hosts_the_rendezvous_is_lost(tmp_path: Path) -> None:
    """The others say so, wait for as long as a rendezvous may take, and end; so does what they began."""
    with Cluster(2, tmp_path / "nodes") as cluster:
        a, b = cluster.nodes
        run = Run(cluster, tmp_path, nnodes="1:2", conf={"join_timeout": 5, "read_timeout": 5})
        run.on([a, b], 2)
        agent = run.job.agents[b]
        run.kill_all(a)
        run.job.agents.pop(b)
        assert agent.wait(120) == 1
        assert f"the rendezvous at {a.address}" in agent.text()
        assert "--rdzv-backend=etcd-v2" in agent.text()
        assert not [p for p in run.lives(b) if p.start["pid"] in b.processes()]


@pytest.mark.skipif(WHY_NO_ETCD is not None, reason=str(WHY_NO_ETCD))
def test_a_member_of_etcd_is_lost_with_its_node(tmp_path: Path) -> None:
    """Three members on three nodes: any may vanish, with its ranks, and the others go on."""
    with Cluster(3, tmp_path / "nodes") as cluster:
        nodes = cluster.nodes
        env, endpoint = begin_etcd(nodes)
        run = Run(cluster, tmp_path, nnodes="2:3", etcd=endpoint, env=env)
        before = run.on(nodes, 3)
        nodes[0].kill()  # the member that every launcher has asked
        two = run.on(nodes[1:], 2, after=time.time())
        begun(before, two)
        run.kill(nodes[2])
        run.on(nodes[1:], 2, after=time.time())
        run.end(nodes[1:])
        run.check(nodes)
        assert "the rendezvous answers again" in run.job.agents[nodes[1]].text()


@pytest.mark.skipif(WHY_NO_ETCD is not None, reason=str(WHY_NO_ETCD))
def test_a_member_of_etcd_is_lost_and_no_rank_notices(tmp_path: Path) -> None:
    with Cluster(2, tmp_path / "nodes", head=True) as cluster:
        a, b = cluster.nodes
        assert cluster.head is not None
        env, endpoint = begin_etcd([cluster.head, a, b])
        run = Run(cluster, tmp_path, nnodes="2", etcd=endpoint, env=env)
        before = run.on([a, b], 2)
        cluster.head.kill()
        run.job.await_(
            lambda: all("answers again" in run.job.agents[n].text() for n in (a, b)),
            "another member",
        )
        last = max(life.last for life in run.newest([a, b]))
        run.job.await_(lambda: min(x.last for x in run.newest([a, b])) > last + 20, "steps")
        run.end([a, b])
        run.check([a, b])
        assert len(run.lives(a)) == len(run.lives(b)) == 1 and before


def test_a_launcher_that_is_told_to_end_leaves_the_others(tmp_path: Path) -> None:
    with Cluster(2, tmp_path / "nodes", head=True) as cluster:
        a, b = cluster.nodes
        run = Run(cluster, tmp_path, nnodes="1:2")
        before = run.on([a, b], 2)
        run.job.agents.pop(a).signal(signal.SIGTERM)
        begun(before, run.on([b], 1, after=time.time()))
        run.end([b])
        run.check([a, b])


def test_a_rank_is_done_without_until_there_is_a_process_for_it(tmp_path: Path) -> None:
    """`--nproc-min`: four ranks, three, and four."""
    with Cluster(1, tmp_path / "nodes", head=True) as cluster:
        (node,) = cluster.nodes
        run = Run(cluster, tmp_path, nnodes="1", nproc=4, words=["--nproc-min=2"])
        before = run.on([node], 4)
        at = time.time()
        run.kill(node, 2)
        after = run.on([node], 4, after=at)
        run.end([node])
        run.check([node])
        lives = [run.lives(node, slot)[1:] for slot in range(4)]
        three = [of[0] for of in lives if of[0].start["size"] == 3]
        assert len(three) == 3 and begun(before, three) <= begun(three, after)
        assert gone(run, before, after) == pids(before[2:3])


def test_two_nodes_grow_again_to_the_ranks_they_had(tmp_path: Path) -> None:
    with Cluster(2, tmp_path / "nodes", head=True) as cluster:
        a, b = cluster.nodes
        run = Run(cluster, tmp_path, nnodes="2", nproc=2, words=["--nproc-min=1"])
        before = run.on([a, b], 4)
        at = time.time()
        run.kill(b, 0)
        after = run.on([a, b], 4, after=at)
        run.end([a, b])
        run.check([a, b])
        begun(before, after)
        assert 3 in {life.start["size"] for life in run.lives(a)}
        assert gone(run, before, after) == pids(before[2:3])


def test_a_device_that_fails_again_and_again_is_left_out(tmp_path: Path) -> None:
    with Cluster(1, tmp_path / "nodes", head=True) as cluster:
        (node,) = cluster.nodes
        options = Options(fails_at="1:0")
        run = Run(cluster, tmp_path, options, nnodes="1", nproc=3, words=["--nproc-min=2"])
        run.on([node], 2)
        run.end([node])
        run.check([node])
        said = run.job.agents[node].text()
        assert "local rank 1 failed 3 times at once: it is left out from now on" in said


def test_a_node_that_fails_again_and_again_leaves(tmp_path: Path) -> None:
    with Cluster(2, tmp_path / "nodes", head=True) as cluster:
        a, b = cluster.nodes
        run = Run(cluster, tmp_path, Options(fails_at="0:0"), nnodes="1:2")
        agent = run.job.agents[a]
        run.job.await_(lambda: "this node leaves the run" in agent.text(), "that it leaves")
        run.job.agents.pop(a)
        assert agent.wait(300) == 1
        run.on([b], 1)
        run.end([b])
        run.check([a, b])
        assert "ranks of node0 failed 3 times at once" in agent.text()


def test_a_script_that_is_not_marked_is_started_again_on_all_nodes(tmp_path: Path) -> None:
    with Cluster(2, tmp_path / "nodes", head=True) as cluster:
        a, b = cluster.nodes
        run = Run(cluster, tmp_path, Options(is_plain=True), nnodes="2")
        before = run.on([a, b], 2)
        run.kill(a)
        after = run.on([a, b], 2, after=time.time())
        run.end([a, b])
        run.check([a, b])
        begun(before, after)
        assert not pids(before) & pids(after)
