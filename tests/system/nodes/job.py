"""torchrun on the nodes of a cluster, with settings under which failures are noticed in seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .spaces import Process

if TYPE_CHECKING:
    from .cluster import Cluster, Node

PORT = 29400
FORKING = (str(Path(__file__).parents[2] / "forking.py"),)
"""A torchrun whose ranks start quickly."""
QUICK = {
    "join_timeout": 60,
    "last_call_timeout": 1,
    "close_timeout": 5,
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 3,
    "read_timeout": 40,
}
"""Settings of the rendezvous; docs/how-to/elastic.md tells what each does."""
TOGETHER = {"last_call_timeout": 5}
"""For nodes that are to be in the first round all, though some begin later on a busy machine."""


class Job:
    """A script under one torchrun per node, `start`ed node by node.

    `nnodes` is a number of nodes or `MIN:MAX`; `nproc` ranks run on each.  `conf` is put on top of `QUICK`.
    The cluster's head hosts the rendezvous, or else `rdzv`, by default the first node, within its torchrun.
    `torchrun`: arguments of Python that start it.
    """

    def __init__(
        self,
        cluster: Cluster,
        script: Path,
        args: Sequence[object] = (),
        *,
        nnodes: str | int,
        nproc: int = 1,
        max_restarts: int = 10,
        rdzv: Node | None = None,
        conf: dict[str, object] | None = None,
        env: dict[str, str] | None = None,
        torchrun: Sequence[str] = ("-m", "torch.distributed.run"),
    ) -> None:
        self.agents: dict[Node, Process] = {}
        self._host = rdzv or cluster.head or cluster.nodes[0]
        self._conf = QUICK | (conf or {})
        self._env = {
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        } | (env or {})
        port = PORT + cluster.num_jobs
        options = ["--rdzv-backend=c10d", f"--rdzv-endpoint={self._host.address}:{port}"]
        options += [f"--rdzv-id=job{cluster.num_jobs}"]
        options += [
            f"--nnodes={nnodes}",
            f"--nproc-per-node={nproc}",
            f"--max-restarts={max_restarts}",
        ]
        self._torchrun = [sys.executable, *torchrun, *options]
        self._command = [script, *args]
        if self._host is cluster.head:
            server = Path(__file__).with_name("rendezvous.py")
            self._host.run([sys.executable, server, self._host.address, port])

    def start(self, node: Node) -> Process:
        """Start torchrun on a node."""
        conf = self._conf | {"is_host": int(node is self._host)}
        own = [f"--local-addr={node.address}", "--rdzv-conf"]
        own += [",".join(f"{key}={value}" for key, value in conf.items())]
        self.agents[node] = node.run([*self._torchrun, *own, *self._command], self._env)
        return self.agents[node]

    def await_(self, condition: Callable[[], object], what: str, timeout_s: float = 180) -> None:
        """Wait until a condition holds; AssertionError if it takes too long, or if a torchrun fails."""
        until = time.monotonic() + timeout_s
        while not condition():
            failed = [n.name for n, agent in self.agents.items() if n.alive and agent.poll()]
            assert not failed, f"torchrun of {failed} failed before {what}\n{self.tail()}"
            assert time.monotonic() < until, f"{what}: not within {timeout_s:g} s\n{self.tail()}"
            time.sleep(0.02)

    def wait(self, timeout_s: float = 180) -> None:
        """Wait until torchrun has ended well on every node that is still there."""
        left = [agent for node, agent in self.agents.items() if node.alive]
        self.await_(lambda: all(agent.poll() == 0 for agent in left), "the end", timeout_s)

    def tail(self, num_chars: int = 3000) -> str:
        """The end of what each torchrun and its ranks have printed."""
        return "\n".join(f"--- {n.name}\n{a.text()[-num_chars:]}" for n, a in self.agents.items())
