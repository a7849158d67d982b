"""Nodes on one machine: each has a network, a host name, memory files and process numbers of its own.

    with Cluster(4, tmp_path) as cluster:
        job = cluster.torchrun("train.py", [root], nnodes="1:4")
        cluster.nodes[2].kill()  # vanishes: its processes, its memory, its address, and no word to anybody
        job.start(cluster.add())
        job.wait(300)

A node is a set of namespaces: an own `lo` and `eth0`, private /dev/shm and /run (TMPDIR is there), own
process numbers, an own boot id, and the names of all nodes in /etc/hosts.  Other files are the machine's,
as on a network file system.  A bridge, in a namespace too, joins the nodes.  So the machine itself gets no
interface, address, name or mount: clusters cannot meet, and a dead owner leaves nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from .job import Job
from .spaces import Process, Spaces

MAX_NODES = 32
SUBNET = "10.77.0"


class Node:
    """A node.  `name` is its host name, `address` that of its eth0."""

    def __init__(self, cluster: Cluster, number: int, name: str, shm_bytes: int) -> None:
        self.name, self.address = name, f"{SUBNET}.{number}"
        self._cluster, self._number, self._shm_bytes = cluster, number, shm_bytes
        self._boots = self._num_runs = 0
        self._spaces: Spaces | None = None
        self.boot()

    def boot(self) -> None:
        """Start it again after `kill`: same name and address, another boot id, empty memory."""
        assert self._spaces is None, f"{self.name} runs"
        self._boots += 1
        # Another name each time: the kernel takes a while to drop the last one.
        self._port = f"port{self._number}.{self._boots}"
        spaces = self._spaces = self._cluster.spaces(self.name, self._shm_bytes)
        peer = f"peer name eth0 address {_mac(self._number)} netns {spaces.pid}"
        self._switch.network(
            f"link add {self._port} type veth {peer}", f"link set {self._port} master bridge up"
        )
        others = [n for n in range(1, MAX_NODES + 1) if n != self._number]
        spaces.network(
            f"address add {self.address}/24 dev eth0",
            "link set eth0 up",
            # As behind a router: an address that vanished is silent, rather than "no route to host".
            *(f"neighbour add {SUBNET}.{n} lladdr {_mac(n)} dev eth0" for n in others),
        )

    @property
    def alive(self) -> bool:
        """Whether it runs: `kill` has not been called, or `boot` has since."""
        return self._spaces is not None

    @property
    def _inside(self) -> Spaces:
        assert self._spaces is not None, f"{self.name} has vanished"
        return self._spaces

    @property
    def _switch(self) -> Spaces:
        return self._cluster.switch

    # -- programs ---------------------------------------------------------------------------------

    def run(
        self, argv: Sequence[object], env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> Process:
        """Start a program, in the cluster's folder or in `cwd`.

        `env` is put on top of this process's environment.
        """
        folder = self._cluster.folder
        output = folder / f"{self.name}-{self._num_runs}.log"
        self._num_runs += 1
        environment = os.environ | {"TMPDIR": "/run/tmp"} | (env or {})
        return self._inside.run([*map(str, argv)], environment, cwd or folder, output)

    def call(
        self, argv: Sequence[object], env: dict[str, str] | None = None, timeout_s: float = 120
    ) -> str:
        """Run a program to its end; what it printed.  AssertionError unless it ends with 0."""
        process = self.run(argv, env)
        status = process.wait(timeout_s)
        assert status == 0, f"{argv[0]} ended {status} on {self.name}\n{process.text()[-3000:]}"
        return process.text()

    def processes(self) -> dict[int, int]:
        """Every process of the node: its number there, and its number here."""
        return self._inside.processes()

    def signal(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process that has number `pid` on the node."""
        os.kill(self.processes()[pid], number)

    def path(self, there: str) -> Path:
        """The file that is at the absolute path `there` on the node, as this process reaches it."""
        return Path(f"/proc/{self._inside.pid}/root{there}")

    # -- failures ---------------------------------------------------------------------------------

    def kill(self) -> None:
        """The node vanishes with all its processes and memory, and no packet tells it."""
        self.cut()  # else the kernel would say goodbye for each connection
        left = self._inside.end()
        self._spaces = None
        assert not left, "\n".join(left)

    def cut(self) -> None:
        """Packets from and to the node are lost in silence; the link looks up at both ends."""
        self._switch.network(f"link set {self._port} nomaster")

    def join(self) -> None:
        """End of `cut`."""
        self._switch.network(f"link set {self._port} master bridge")

    def slow(self, rate: str, delay: str | None = None) -> None:
        """At most `rate` (`10mbit`) in each direction, and each packet `delay` (`50ms`) late.

        A delay needs a kernel for which `can_delay()` is true.
        """
        queue = f"tbf rate {rate} burst 64kb latency 400ms"
        if delay is not None:
            queue = f"netem rate {rate} delay {delay}"
        self._inside.queue(f"replace dev eth0 root {queue}")
        self._switch.queue(f"replace dev {self._port} root {queue}")

    def normal(self) -> None:
        """End of `slow`."""
        self._inside.queue("delete dev eth0 root")
        self._switch.queue(f"delete dev {self._port} root")


class Cluster:
    """`num_nodes` nodes, and a `head` that is for no ranks if it is asked for.

    `folder` takes what programs print: NAME-K.log for program K of a node.  `shm_bytes` is the size of each
    node's /dev/shm.  On leaving everything is ended; AssertionError if something would not go.
    """

    def __init__(
        self, num_nodes: int, folder: Path, *, head: bool = False, shm_bytes: int = 256 << 20
    ) -> None:
        self.folder = folder
        self.nodes: list[Node] = []
        self.head: Node | None = None
        self.num_jobs = 0
        self._num_nodes, self._wants_head, self._shm_bytes = num_nodes, head, shm_bytes
        self._made: list[Spaces] = []

    def __enter__(self) -> Cluster:
        self.folder.mkdir(parents=True, exist_ok=True)
        names = ["head", *(f"node{n}" for n in range(MAX_NODES - 1))]
        lines = [f"{SUBNET}.{number} {name}" for number, name in enumerate(names, 1)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        try:
            self.switch = self.spaces("switch", 1 << 20)
            self.switch.network("link add bridge type bridge", "link set bridge up")
            if self._wants_head:
                self.head = Node(self, 1, "head", self._shm_bytes)
            for _ in range(self._num_nodes):
                self.add()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def add(self, shm_bytes: int | None = None) -> Node:
        """One node more, joined to the others."""
        number = len(self.nodes)
        node = Node(self, number + 2, f"node{number}", shm_bytes or self._shm_bytes)
        self.nodes.append(node)
        return node

    def torchrun(
        self,
        script: Path,
        args: Sequence[object] = (),
        *,
        nodes: Sequence[Node] | None = None,
        **options: Any,
    ) -> Job:
        """Start torchrun on every node there is, or on `nodes`; the other options are those of `Job`."""
        job = Job(self, script, args, **options)
        self.num_jobs += 1
        for node in nodes or [node for node in self.nodes if node.alive]:
            job.start(node)
        return job

    def spaces(self, name: str, shm_bytes: int) -> Spaces:
        """New namespaces that end with the cluster."""
        self._made.append(Spaces(name, self.folder / "hosts", shm_bytes))
        return self._made[-1]

    def close(self) -> None:
        """End all nodes; AssertionError if anything of them is left."""
        left = [line for spaces in self._made for line in spaces.end()]
        assert not left, "\n".join(left)


def _mac(number: int) -> str:
    return f"02:00:00:00:00:{number:02x}"
