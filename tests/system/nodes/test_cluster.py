"""The nodes are what they say: apart, cut in silence, gone when killed, and never left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.base.host import process_state, start_time

from .cluster import Cluster, Node
from .spaces import Process, can_delay

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.usefixtures("needs_nodes"),
]
HERE = Path(__file__).parent
TALK = [sys.executable, "-S", HERE / "talk.py"]
PORT = 7000


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(2, tmp_path, shm_bytes=1 << 20) as found:
        yield found


def await_(condition: Callable[[], object], timeout_s: float = 120) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def serving(node: Node) -> Process:
    server = node.run([*TALK, "serve", PORT])
    await_(lambda: "ready" in server.text())
    return server


def talking(server: Node, client: Node) -> tuple[Process, Process]:
    """A server, and a client that keeps asking it and has had an answer."""
    answering = serving(server)
    asking = client.run([*TALK, "ask", server.name, PORT])
    hear(asking, "answer")
    return answering, asking


def hear(asking: Process, word: str) -> None:
    """Wait until this is what a client hears."""
    await_(lambda: asking.text().endswith(f"{word}\n"))


# -- apart ----------------------------------------------------------------------------------------


def test_a_node_has_its_own_name_place_and_memory(cluster: Cluster) -> None:
    place = [sys.executable, "-c", "from holdfast.base.host import host_id; print(host_id())"]
    boot = ["cat", "/proc/sys/kernel/random/boot_id"]
    a, b = cluster.nodes
    names = [node.call(place).split()[0] for node in (a, b)]
    assert names == ["node0", "node1"]
    assert len({node.call(place) for node in (a, b)}) == 2
    assert len({Path(boot[1]).read_text(), *(node.call(boot) for node in (a, b))}) == 3
    a.call(["sh", "-c", "echo kept > /dev/shm/x"])
    assert b.call(["ls", "/dev/shm"]) == ""
    too_much = a.run(["dd", "if=/dev/zero", "of=/dev/shm/y", "bs=1M", "count=2"])
    assert too_much.wait(120) != 0
    assert "No space left on device" in too_much.text()


def test_clusters_do_not_meet(cluster: Cluster, tmp_path: Path) -> None:
    """Same names and addresses, at the same time."""
    talking(*cluster.nodes)
    with Cluster(2, tmp_path / "other") as other:
        refused = other.nodes[1].run([*TALK, "ask", "node0", PORT])
        assert refused.wait(120) != 0
        assert "Connection refused" in refused.text()


def test_the_machine_is_left_as_it_is(cluster: Cluster) -> None:
    interfaces = {name for _, name in socket.if_nameindex()}
    assert not [name for name in interfaces if name.startswith(("port", "bridge"))]
    mounts = Path("/proc/self/mountinfo").read_text()
    assert str(cluster.folder) not in mounts and "boot_id" not in mounts
    assert socket.gethostname() not in {node.name for node in cluster.nodes}


# -- failures -------------------------------------------------------------------------------------


def test_a_cut_is_silent_and_heals(cluster: Cluster) -> None:
    a, b = cluster.nodes
    server, asking = talking(a, b)
    a.cut()
    hear(asking, "silence")
    a.join()
    hear(asking, "answer")
    assert "closed" not in asking.text()
    server.signal(signal.SIGKILL)  # the kernel closes what a dead process had open
    hear(asking, "closed")
    assert server.wait(120) == -signal.SIGKILL


def test_a_killed_node_vanishes_in_silence(cluster: Cluster) -> None:
    a, b = cluster.nodes
    server, asking = talking(a, b)
    a.call(["sh", "-c", "echo kept > /dev/shm/x; setsid sleep 600 &"])
    running = [(pid, start_time(pid)) for pid in a.processes().values()]
    assert len(running) > 3
    a.kill()
    assert all(process_state(pid, since) == "gone" for pid, since in running)
    assert server.poll() == -signal.SIGKILL
    hear(asking, "silence")
    assert "closed" not in asking.text()
    a.boot()
    assert a.call(["ls", "/dev/shm"]) == ""
    hear(asking, "closed")  # the node that came back does not know the connection


def test_a_slow_link(cluster: Cluster) -> None:
    a, b = cluster.nodes
    serving(a)
    num_bytes = 1_000_000

    def took_s() -> float:
        return float(b.call([*TALK, "send", a.address, PORT, num_bytes]))

    def took_slowly_s() -> float:
        """Which no machine can make shorter."""
        seconds = took_s()
        assert seconds > at_8mbit_s * 0.8
        return seconds

    at_8mbit_s = num_bytes * 8 / 8e6
    a.slow("8mbit")
    await_(lambda: took_slowly_s() < at_8mbit_s * 4)  # a busy machine may make it longer
    a.normal()
    await_(lambda: took_s() < at_8mbit_s / 2)


def test_a_late_link(cluster: Cluster) -> None:
    if not can_delay():
        pytest.skip("this kernel has no sch_netem")
    a, b = cluster.nodes
    serving(a)
    a.slow("1gbit", delay="50ms")
    assert float(b.call([*TALK, "send", a.address, PORT, 1])) > 0.09


# -- nothing is left ------------------------------------------------------------------------------


def test_what_would_not_go_is_told(cluster: Cluster) -> None:
    """A process that went into the network alone is not in the node's process namespace."""
    node = cluster.nodes[0]
    enter = node._inside.enter("net")
    with subprocess.Popen(
        [*enter, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as intruder:
        assert intruder.stdin is not None and intruder.stdout is not None
        intruder.stdin.write(b"in\n")
        intruder.stdin.flush()
        assert intruder.stdout.readline() == b"in\n"
        with pytest.raises(
            AssertionError, match=f"node0: process {intruder.pid} is left in its net"
        ):
            node.kill()


def test_a_killed_owner_leaves_nothing(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, HERE / "owner.py", tmp_path],
        env=os.environ | {"PYTHONPATH": f"{HERE.parents[1]}:{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.PIPE,
    )
    assert owner.stdout is not None
    running = json.loads(owner.stdout.readline())
    assert len(running) > 4
    assert all(process_state(*one) == "runs" for one in running)
    owner.kill()
    owner.communicate()
    await_(lambda: all(process_state(*one) == "gone" for one in running))
