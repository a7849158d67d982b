"""`holdfast run` on the nodes of a cluster, and what the ranks of `recover_train.py` have written there."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import holdfast

from .cluster import Cluster, Node
from .job import Job
from .recover_train import WIDTH, Options, digest, expected
from .story import TCP, records

WHY_NO_ETCD = (
    "no etcd-server, of Debian, on this machine"
    if shutil.which("etcd") is None
    else "no python-etcd: pip install python-etcd"
    if find_spec("etcd") is None
    else None
)
TRAIN = Path(__file__).with_name("recover_train.py")
LIMIT_S = 180


@dataclass
class Life:
    """What one rank wrote from one beginning to the next."""

    start: dict[str, Any]
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    committed: list[int] = field(default_factory=list)

    @property
    def last(self) -> int:
        return max(self.steps, default=int(self.start["begins"]))


def begin_etcd(nodes: Sequence[Node]) -> tuple[dict[str, str], str]:
    """Start a member of etcd on each node; return an environment and the endpoints for launchers."""
    members = ",".join(f"{n.name}=http://{n.address}:2380" for n in nodes)
    for node in nodes:
        ours = f"http://{node.address}"
        node.run(
            ["etcd", "--enable-v2", f"--name={node.name}", "--data-dir=/run/tmp/etcd"]
            + [f"--listen-client-urls={ours}:2379", f"--advertise-client-urls={ours}:2379"]
            + [f"--listen-peer-urls={ours}:2380", f"--initial-advertise-peer-urls={ours}:2380"]
            + [f"--initial-cluster={members}", "--initial-cluster-state=new"]
        )
    for node in nodes:
        health = f"import urllib.request as u; u.urlopen('http://{node.address}:2379/health')"
        again = f'until {sys.executable} -c "{health}" 2>/dev/null; do sleep 0.2; done'
        node.call(["sh", "-c", again])
    return {"PYTHONWARNINGS": "ignore"}, ",".join(f"{n.address}:2379" for n in nodes)


class Launched(Job):
    """The launchers: with their own settings of the rendezvous, but for what a test adds."""

    def __init__(
        self,
        cluster: Cluster,
        args: Sequence[object],
        conf: dict[str, object],
        etcd: str = "",
        **of: Any,
    ) -> None:
        super().__init__(cluster, TRAIN, args, max_restarts=100, **of)
        self._conf = {"join_timeout": 60, **conf}
        del self._env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]
        if etcd:
            self._torchrun += ["--rdzv-backend=etcd-v2", f"--rdzv-endpoint={etcd}"]


class Run:
    """The job on `nodes`, or on all."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        options: Options | None = None,
        *,
        nnodes: str,
        nproc: int = 1,
        words: Sequence[str] = (),
        conf: dict[str, object] | None = None,
        nodes: Sequence[Node] | None = None,
        **of: Any,
    ) -> None:
        self.cluster, self.nproc = cluster, nproc
        self.root, self.logs = folder / "root", folder / "logs"
        self.logs.mkdir(parents=True)
        given = json.dumps(dataclasses.asdict(options or Options()))
        torchrun = ("-m", "holdfast", "run", *words)
        self.job = Launched(
            cluster,
            [self.root, self.logs, given],
            conf or {},
            nnodes=nnodes,
            nproc=nproc,
            torchrun=torchrun,
            **of,
        )
        cluster.num_jobs += 1
        for node in nodes or cluster.nodes:
            self.join(node)

    def join(self, node: Node) -> None:
        node.call(["sh", "-c", f"echo 4 > {TCP}/tcp_retries2"])
        self.job.start(node)

    # -- what ranks have written ------------------------------------------------------------------

    def lives(self, node: Node, slot: int = 0) -> list[Life]:
        found: list[Life] = []
        for record in records(self.logs / f"{node.name}.{slot}.jsonl"):
            if "begins" in record:
                found.append(Life(record))
            elif "step" in record:
                found[-1].steps[record["step"]] = record
            elif "committed" in record and found:
                found[-1].committed.append(record["committed"])
        return found

    def newest(self, nodes: Sequence[Node]) -> list[Life]:
        """The last life of each rank there is."""
        return [of[-1] for n in nodes for s in range(self.nproc) if (of := self.lives(n, s))]

    def on(
        self, nodes: Sequence[Node], size: int, steps: int = 6, after: float = 0.0
    ) -> list[Life]:
        """Wait until exactly `size` ranks of these nodes have done so many steps, in lives begun after that
        time; return those."""

        def now() -> list[Life]:
            return [
                life
                for life in self.newest(nodes)
                if life.start["size"] == size and life.start["time"] > after
            ]

        def are_on() -> bool:
            lives = now()
            return len(lives) == size and all(
                x.last >= x.start["begins"] + steps and x.committed for x in lives
            )

        self.job.await_(are_on, f"{size} ranks that do {steps} steps", LIMIT_S)
        return now()

    def kill(self, node: Node, slot: int = 0, number: int = signal.SIGKILL) -> None:
        """Signal a rank."""
        node.signal(self.lives(node, slot)[-1].start["pid"], number)

    def kill_all(self, node: Node) -> None:
        """The launcher and all that it began are gone; the node stays."""
        self.job.agents.pop(node)
        for pid in node.processes().values():
            with suppress(ProcessLookupError, FileNotFoundError):
                if "python" in os.readlink(f"/proc/{pid}/exe"):  # not what holds the namespaces
                    os.kill(pid, signal.SIGKILL)

    def end(self, nodes: Sequence[Node], more: int = 5) -> None:
        """Have it train some steps more, and wait until all have ended well."""
        last = max(life.last for life in self.newest(nodes))
        (self.logs / "end").write_text(str(last + more))
        self.job.wait(LIMIT_S)

    def check(self, nodes: Sequence[Node]) -> None:
        """Every step that any rank did, and every state that was restored, is the one expected."""
        lives = [x for n in nodes for s in range(self.nproc) for x in self.lives(n, s)]
        known = ["", *islice(expected(), max(life.last for life in lives))]
        for life in lives:
            begins = life.start["begins"]
            assert begins == 0 or life.start["digest"] == known[begins]
            assert all(known[n] == record["digest"] for n, record in life.steps.items())

    def check_saved(self) -> None:
        """What is in storage is right, whoever has saved it."""
        steps = holdfast.steps(str(self.root))
        known = ["", *islice(expected(), max(steps))]
        for step in steps:
            state = {n: torch.zeros(WIDTH, dtype=torch.float64) for n in ("weights", "momentum")}
            assert holdfast.load(str(self.root), state, step=step) == step
            assert digest(state) == known[step]
