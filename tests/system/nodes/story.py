"""A job of `elastic_train.py` on a cluster, what its ranks have written down, and what its agents hold."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cluster import Cluster, Node
from .elastic_train import Options
from .job import FORKING

TRAIN = Path(__file__).with_name("elastic_train.py")
HOME = "/dev/shm/holdfast-0"
TCP = "/proc/sys/net/ipv4"
LIMIT_S = 300


@dataclass
class Life:
    """What one rank wrote between its start and its end: `start`, a record per step, and events."""

    start: dict[str, Any]
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def key(self) -> tuple[float, int]:
        """Tells it from all others of its node."""
        return self.start["time"], self.start["pid"]

    @property
    def begun(self) -> bool:
        """Whether it has restored."""
        return "restored" in self.start

    @property
    def last(self) -> int:
        return max(self.steps, default=self.start.get("restored", 0))

    @property
    def committed(self) -> list[int]:
        """Steps of snapshots, and of durable saves from memory, that are complete."""
        names = ("snapshot.committed", "save.committed")
        return [e["step"] for e in self.events if e["event"] in names]

    def of(self, name: str) -> list[dict[str, Any]]:
        """Events of that name."""
        return [e for e in self.events if e["event"] == name]

    def moved(self, what: str) -> int:
        """Bytes that its restore read: `local`, `peer`, `rebuilt`, `storage`, or all."""
        moved = self.start["moved"]
        return int(moved.get(f"memory.{what}.bytes" if what != "all" else "read.bytes", 0))


def records(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may not be there yet."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def lives_in(path: Path) -> list[Life]:
    """Of one rank, from the file that all of its lives have written to."""
    found: list[Life] = []
    for record in records(path):
        if "pid" in record:
            found.append(Life(record))
        elif "restored" in record or "closed" in record:
            found[-1].start |= record
        elif "event" in record:
            found[-1].events.append(record)
        else:
            found[-1].steps[record["step"]] = record
    return found


class Story:
    """The job.  `folder` takes its root and its logs; `conf` is of the rendezvous."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        options: Options | None = None,
        *,
        nnodes: str,
        nproc: int = 1,
        retries: int = 2,
        conf: dict[str, object] | None = None,
    ) -> None:
        self.cluster = cluster
        self._conf = conf
        self.root, self.logs = folder / "root", folder / "logs"
        self.logs.mkdir(parents=True)
        self.nproc = nproc
        self._retries = retries
        for node in cluster.nodes:
            self.impatient(node)
        self._options = json.dumps(dataclasses.asdict(options or Options()))
        self.start([node for node in cluster.nodes if node.alive], nnodes)

    def start(self, nodes: list[Node], nnodes: str = "") -> None:
        """Start torchrun there; for as many nodes, if nothing else is said."""
        self.job = self.cluster.torchrun(
            TRAIN,
            [self.root, self.logs, self._options],
            nodes=nodes,
            nnodes=nnodes or f"{len(nodes)}:{len(nodes)}",
            nproc=self.nproc,
            conf=self._conf,
            max_restarts=1000,
            torchrun=FORKING,
        )

    def impatient(self, node: Node, retries: int | None = None) -> None:
        """Dead connections fail after seconds there, and not after 15 minutes.  Where the kernel can, those
        of a link that comes back are tried each second, and not after as long as it was cut."""
        number = self._retries if retries is None else retries
        each_second = f"test ! -e {TCP}/tcp_rto_max_ms || echo 1000 > {TCP}/tcp_rto_max_ms"
        node.call(["sh", "-c", f"echo {number} > {TCP}/tcp_retries2; {each_second}"])

    def join(self, node: Node) -> None:
        """A node that is new, or was started again, takes part."""
        self.impatient(node)
        self.job.start(node)

    # -- what ranks have written ------------------------------------------------------------------

    def lives(self, node: Node, local: int = 0) -> list[Life]:
        return lives_in(self.logs / f"{node.name}.{local}.jsonl")

    def all_lives(self, node: Node) -> list[Life]:
        """Of all ranks there."""
        return [life for local in range(self.nproc) for life in self.lives(node, local)]

    def newest(self, nodes: list[Node]) -> list[Life]:
        """The last life of each rank; one that has not begun where there is none yet."""
        return [
            (self.lives(n, i) or [Life({"time": 0.0, "pid": 0})])[-1]
            for n in nodes
            for i in range(self.nproc)
        ]

    def reference(self, until: int, num_ranks: int) -> dict[int, dict[str, Any]]:
        """What each step should be, up to that one at least: the training without holdfast, made now on
        this machine by so many ranks.  How far the job gets is the machine's choice, not the test's."""
        path = self.logs / "reference.jsonl"
        known = {record["step"]: record for record in records(path)}
        if until in known:
            return known
        command = [sys.executable, *FORKING, "--standalone", f"--nproc-per-node={num_ranks}", TRAIN]
        env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*map(str, command), self.root, self.logs, self._options, str(until)],
            env=env, capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return {record["step"]: record for record in records(path)}

    def go_on(self, nodes: list[Node], num_lives: int, steps: int) -> None:
        """Wait until all these nodes are in that life and so many steps further."""

        def on() -> bool:
            lives = [self.lives(node) for node in nodes]
            return all(
                len(of) == num_lives
                and of[-1].begun
                and of[-1].last >= of[-1].start["restored"] + steps
                for of in lives
            )

        self.job.await_(on, f"life {num_lives}")

    def end(self, nodes: list[Node], more: int = 5) -> None:
        """Have it train some steps more, and wait until all have ended well."""
        last = max(life.last for life in self.newest(nodes))
        (self.logs / "end").write_text(str(last + more))
        self.job.wait()

    # -- what agents hold -------------------------------------------------------------------------

    def agent(self, node: Node) -> int:
        """The number that the agent has on its node; of the next one, if it has died just now."""

        def number() -> int:
            return int(json.loads(node.path(f"{HOME}/agent.json").read_bytes())["pid"])

        self.job.await_(lambda: number() in node.processes(), "an agent", 120)
        return number()

    def kill_agent(self, node: Node) -> None:
        node.signal(self.agent(node))

    def stop_agent(self, node: Node) -> None:
        node.signal(self.agent(node), signal.SIGSTOP)

    def slots(self, node: Node) -> Iterator[dict[str, Any]]:
        """Headers of the slots there, as the next agent would find them."""
        for path in node.path(f"{HOME}/jobs").glob("*/*-*.json"):
            with suppress(FileNotFoundError):  # the agent has just removed it
                yield json.loads(path.read_bytes())

    def segments(self, node: Node) -> list[str]:
        """Whatever is kept on a node for any job."""
        return [p.name for p in node.path(f"{HOME}/jobs").glob("*/*")]
