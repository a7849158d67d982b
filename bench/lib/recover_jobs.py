"""Jobs of the claim `recover`: how a contestant is started, killed, watched and ended."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.lib.stamps import Failure, Log, Record

RANKS = 4
LIMIT_S = 300.0
_PR_SET_CHILD_SUBREAPER = 36
ROOT_AT = 3
"""Where a script's words have the root."""
Words = list[str]


class DoesNotRun(Exception):
    """A contestant that cannot do what it is asked for; says why."""


# -- launchers ------------------------------------------------------------------------------------


def torchrun(ranks: int = RANKS, *options: str) -> Words:
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    return [*launcher, *(options or ["--standalone"]), f"--nproc-per-node={ranks}",
            "--max-restarts=1000"]  # fmt: skip


def holdfast_run(*options: str) -> Words:
    launcher = [sys.executable, "-m", "holdfast", "run", "--standalone"]
    return [*launcher, f"--nproc-per-node={RANKS}", "--max-restarts=1000", *options]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass(frozen=True)
class Contestant:
    """`kind`: what its ranks run; `launch`: its processes, each a command and what it has of its own in
    the environment; `package`: what must be installed."""

    name: str
    kind: str
    launch: Callable[[Words, int], list[tuple[Words, dict[str, str]]]]
    package: str = ""
    spares: int = 0
    mortal: tuple[int, ...] = tuple(range(RANKS))
    """Ranks that may be killed."""
    shrinks: bool = False
    is_peer: bool = False


def under(
    *launcher: str, **environment: str
) -> Callable[[Words, int], list[tuple[Words, dict[str, str]]]]:
    return lambda script, kills: [([*launcher, *script], environment)]


def bare(script: Words, kills: int) -> list[tuple[Words, dict[str, str]]]:
    """Processes without a launcher, and a reserve for each kill."""
    port, count = free_port(), RANKS + kills
    return [
        ([sys.executable, *script],
         {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
          "MASTER_PORT": str(port)})
        for rank in range(count)
    ]  # fmt: skip


def groups(script: Words, kills: int) -> list[tuple[Words, dict[str, str]]]:
    """A lighthouse, and a torchrun for each replica group."""
    port, code = free_port(), Path(script[ROOT_AT]) / "lighthouse.py"
    code.write_text("from torchft._torchft import lighthouse_main\n\nlighthouse_main()\n")
    lighthouse = [sys.executable, str(code), "--min_replicas=1", f"--bind=[::]:{port}",
                  "--quorum_tick_ms=100", "--join_timeout_ms=10000"]  # fmt: skip
    known = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"}
    replicas = [
        ([*torchrun(1), *script], known | {"REPLICA_GROUP_ID": str(n)}) for n in range(RANKS)
    ]
    return [(lighthouse, {}), *replicas]


CONTESTANTS = {
    c.name: c
    for c in (
        Contestant("place", "place", under(*holdfast_run("--spares=1")), spares=1),
        Contestant(
            "pages",
            "place",
            under(*holdfast_run("--spares=1"), THP_MEM_ALLOC_ENABLE="0"),
            spares=1,
        ),
        Contestant("holdfast", "place", under(*torchrun())),
        Contestant("dcp", "dcp", under(*torchrun())),
        Contestant("warm", "dcp", under(*holdfast_run())),
        Contestant("shrink", "place", under(*holdfast_run("--nproc-min=3")), shrinks=True),
        Contestant("nvrx", "nvrx", bare, "nvidia_resiliency_ext", mortal=(1, 2, 3), is_peer=True),
        Contestant("torchft", "torchft", groups, "torchft", is_peer=True),
        Contestant("lm", "lm", under(*torchrun()), "lm_resiliency", is_peer=True),
    )
}
WHOLE = Contestant("whole", "whole", under(*torchrun()))


def missing(one: Contestant, peers: str) -> str:
    """What a contestant lacks on this machine; empty if nothing."""
    if one.shrinks:
        words = [sys.executable, "-m", "holdfast", "run", "--help"]
        told = subprocess.run(words, capture_output=True, text=True, check=False).stdout
        return "" if "--nproc-min" in told else "`holdfast run` has no --nproc-min"
    if one.package:
        with path_added(peers):
            if importlib.util.find_spec(one.package) is None:
                return f"{one.package} is not installed (--peers)"
    return ""


class path_added:  # noqa: N801  used like contextlib's
    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> None:
        if self.path:
            sys.path.append(self.path)

    def __exit__(self, *_: object) -> None:
        if self.path:
            sys.path.remove(self.path)


# -- processes ------------------------------------------------------------------------------------


def adopt() -> None:
    """Have daemons that jobs leave behind become children of this process, so that it can end them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(root: int) -> list[int]:
    """All processes below one."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(") ")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, open_ = [], [root]
    while open_:
        below = children.get(open_.pop(), [])
        found += below
        open_ += below
    return found


def end_all() -> None:
    """End everything that this process has begun, and what that left behind."""
    until = time.monotonic() + 10.0
    while (left := descendants(os.getpid())) and time.monotonic() < until:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


@dataclass
class Size:
    """How large the state is, and what else the ranks are told."""

    name: str
    words: Words
    every: int


@dataclass
class Job:
    """A contestant that runs."""

    one: Contestant
    size: Size
    root: Path
    kills: int
    peers: str = ""
    more: Words = field(default_factory=list)

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True)
        self.memory = Path("/dev/shm") / f"holdfast-bench-{os.getpid()}"
        shutil.rmtree(self.memory, ignore_errors=True)
        self.memory.mkdir()
        self.log = Log(self.root / "stamps")
        self.printed = (self.root / "printed").open("w+")
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Job:
        script = ["-m", "bench.lib.recover_train", self.one.kind, str(self.root)]
        script += [*self.size.words, "--every", str(self.size.every), *self.more]
        for command, known in self.one.launch(script, self.kills):
            self.processes.append(self._begin(command, known))
        return self

    def _begin(self, command: Words, known: dict[str, str]) -> subprocess.Popen[bytes]:
        env = os.environ | known | {
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "HOLDFAST_MEMORY_DIR": str(self.memory / "agent"),
            "RECOVER_MEMORY": str(self.memory),
            "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        if "torch.distributed.run" in command and self.one.kind != "torchft":  # it needs the store
            env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else gloo fails after a restart
        if self.one.package and self.peers:
            env["PYTHONPATH"] = self.peers
        return subprocess.Popen(
            command, env=env, stdout=self.printed, stderr=subprocess.STDOUT, start_new_session=True
        )

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.terminate()
        with suppress(subprocess.TimeoutExpired):
            for process in self.processes:
                process.wait(5.0)
        end_all()
        self.printed.close()
        shutil.rmtree(self.memory, ignore_errors=True)
        shutil.rmtree(self.root / "steps", ignore_errors=True)
        os.sync()

    def until(self, is_so: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> None:
        """Wait for something in the log; DoesNotRun if it does not come."""
        until = time.monotonic() + limit_s
        while True:
            self.log.read()
            if is_so():
                return
            if time.monotonic() > until:
                raise DoesNotRun(f"{what}: not within {limit_s:.0f} s; {self.last_words()}")
            if all(p.poll() is not None for p in self.processes):
                self.log.read()
                if is_so():
                    return
                raise DoesNotRun(f"{what}: it has ended; {self.last_words()}")
            time.sleep(0.005)

    def last_words(self) -> str:
        """What it printed about errors, in short."""
        self.printed.flush()
        lines = (self.root / "printed").read_text(errors="replace").splitlines()
        errors = [m[0][:300] for x in lines if (m := re.search(r"\b\w*(Error|error): .+", x))]
        return " | ".join(list(dict.fromkeys(errors))[:3] or lines[-3:])


def failures(job: Job, chance: random.Random, limit_s: float) -> Iterator[Record]:
    """Kill a rank again and again: one to four steps after the last recovery, and somewhere in a step."""
    job.until(
        lambda: any(d.step >= 2 and d.world == RANKS for d in job.log.done), "the first steps"
    )
    for _ in range(job.kills):
        begun = job.log.last
        if job.one.spares:
            job.until(lambda: len(job.log.waiting()) >= job.one.spares, "a spare", 60.0)
            job.log.read()
            begun = job.log.last
        steps = chance.randint(1, 4)
        job.until(lambda: job.log.last >= begun + steps, "steps between failures")
        time.sleep(chance.random() * job.log.step_s())
        rank = chance.choice(job.one.mortal)
        yield struck(job, rank, limit_s)


def struck(job: Job, rank: int, limit_s: float) -> Record:
    """Kill a rank now; what came of it, once all ranks train again."""
    job.log.read()
    pid = job.log.pid(rank)
    failure = Failure(time.time(), rank, pid, job.log.attempt, job.log.last)
    os.kill(pid, signal.SIGKILL)
    ranks = RANKS - 1 if job.one.shrinks else RANKS
    job.until(lambda: failure.whole(job.log, ranks), f"rank {rank} was killed", limit_s)
    return failure.found(job.log, ranks)


def ended(job: Job) -> dict[int, list[str]]:
    """Have it come to an end a few steps later; the digests of its ranks, by step."""
    job.log.read()
    ahead = max(3, round(1.0 / max(job.log.step_s(), 1e-3)))
    under_way = job.root / "end.new"
    under_way.write_text(str(job.log.last + ahead))
    under_way.rename(job.root / "end")
    job.until(lambda: all(p.poll() is not None for p in job.processes) or _told(job), "the end")
    return job.log.digests()


def _told(job: Job) -> bool:
    last = [r for r in job.log.records if r["event"] == "digest"]
    return bool(last) and len(last) >= last[-1].get("world", RANKS)
