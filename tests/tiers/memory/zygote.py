"""Forks ranks from a process that has imported torch, itself forked: a life starts in a tenth of a second.

`Lives.live(script)` forks the ranks, waits for them all and returns what each wrote.  When one has died,
the others are killed shortly after, as torchrun would.  Each rank's node is a directory of an agent.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zygote as programs
from capabilities import FSDP2_ON_CPUS, MUON
from ports import free_port
from tiers.memory.agents import kill
from zygote import PRELOAD

TESTS = Path(__file__).parents[2]
GRACE_S = 1.0
DYING_S = 60.0
"""For ranks that are to die by themselves, where another has died before."""
LIMIT_S = 300.0
KILLED = -9
END = "end\n"
"""The last line that a zygote reads: processes that its tests have forked may hold its input open."""
CRASHES = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGILL, -signal.SIGFPE}


@dataclass(frozen=True)
class Told:
    """What a rank wrote, and how it ended (negative: by which signal)."""

    lines: list[dict[str, Any]]
    status: int

    @property
    def restored(self) -> int:
        found = [x["restored"] for x in self.lines if "restored" in x]
        assert found, f"ended {self.status} before it had restored anything: {self.lines[-3:]}"
        return int(found[0])

    @property
    def start(self) -> str:
        """Digest of the state that it began with."""
        return str(next(x["digest"] for x in self.lines if "restored" in x))

    @property
    def moved(self) -> dict[str, int]:
        """Bytes that the restore read, by where from."""
        return dict(next(x["moved"] for x in self.lines if "restored" in x))

    @property
    def digests(self) -> dict[int, str]:
        """Of the state after each step."""
        return {x["step"]: x["digest"] for x in self.lines if "step" in x and "digest" in x}

    def events(self, name: str) -> list[dict[str, Any]]:
        return [x for x in self.lines if x.get("event") == name]


class Lives:
    """A zygote, and directories for nodes."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.number = 0
        env = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
            "GLOO_SOCKET_IFNAME": "lo",
            "HOLDFAST_HOST": "127.0.0.1",
        }
        (asked, asks), (answered, answers) = os.pipe(), os.pipe()
        self._process = programs.start(
            ["-m", "tiers.memory.zygote"], stdin=asked, out=answers, env=env
        )
        for theirs in (asked, answers):
            os.close(theirs)
        self._asks, self._answers = os.fdopen(asks, "w"), os.fdopen(answered)

    def node(self, number: int) -> Path:
        return self.place / f"node{number}"

    def live(self, *, nodes: list[int], **script: Any) -> list[Told]:
        """A life with one rank for each entry of `nodes`, the number of the node that it runs on."""
        if script.get("layout", "fsdp") in ("fsdp", "hsdp", "tp"):
            FSDP2_ON_CPUS.require()
        if script.get("optimizer") == "muon":
            MUON.require()
        self.number += 1
        out = self.place / f"life{self.number}"
        out.mkdir()
        script = {
            "root": str(self.place / "root"), "layout": "fsdp", "out": str(out),
            "nodes": [str(self.node(n)) for n in nodes], **script,
        }  # fmt: skip
        self._asks.write(json.dumps(script) + "\n")
        self._asks.flush()
        answer = self._answers.readline()
        assert answer, f"the zygote has died: {self._process.wait()}"
        told = []
        for rank, status in enumerate(json.loads(answer)):
            text = (out / f"r{rank}.jsonl").read_text() if (out / f"r{rank}.jsonl").exists() else ""
            lines = [json.loads(x) for x in text.splitlines(keepends=True) if x.endswith("\n")]
            told.append(Told(lines, status))
        crashed = [rank for rank, one in enumerate(told) if one.status in CRASHES]
        assert not crashed, f"ranks {crashed} crashed: {[t.status for t in told]}\n{self.errors()}"
        return told

    def errors(self) -> str:
        """What the ranks of the last life printed."""
        texts = [
            (p.name, p.read_text())
            for p in sorted((self.place / f"life{self.number}").glob("*.err"))
        ]
        return "\n".join(f"--- {name}\n{text[-8000:]}" for name, text in texts)

    def close(self) -> None:
        self._asks.write(END)
        self._asks.close()
        self._process.wait(120)
        self._answers.close()


def lose(lives: Lives, *nodes: int) -> None:
    """The nodes are gone, with their agents and all that they held."""
    for n in nodes:
        kill(lives.node(n))
        shutil.rmtree(lives.node(n))


def check(lives: Lives, told: list[Told], step: int, digests: dict[int, str]) -> None:
    """All ranks have restored that step, bit for bit, and nothing of it from storage."""
    for one in told:
        assert one.lines, lives.errors()
        assert one.restored == step, (one.lines, lives.errors())
        assert one.start == digests[step]
    moved = [one.moved for one in told]
    from_memory = sum(m.get(f"memory.{k}.bytes", 0) for m in moved for k in ("local", "rebuilt"))
    from_peers = sum(m.get("memory.peer.bytes", 0) for m in moved)
    assert sum(m["read.bytes"] for m in moved) <= from_memory + from_peers
    assert not any(one.events("memory.from_storage") for one in told)
    assert not any(m.get("memory.storage.bytes", 0) for m in moved)


def train(lives: Lives, until: int, nodes: list[int], **script: object) -> dict[int, str]:
    """A life that is killed after a step; the digests of its states."""
    told = lives.live(nodes=nodes, until=until, die=True, **script)
    assert [t.status for t in told] == [KILLED] * len(nodes), lives.errors()
    return told[0].digests


def _fork(rank: int, script: dict[str, Any], port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        out = Path(script["out"])
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(out / f"r{rank}.{name}", os.O_WRONLY | os.O_CREAT, 0o600), number)
        world = len(script["nodes"])
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "HOLDFAST_MEMORY_DIR": script["nodes"][rank], **script.get("env", {}),
        }  # fmt: skip
        from tiers.memory.life import Life

        Life(rank, script, out / f"r{rank}.jsonl").run()
        import torch.distributed as dist

        dist.destroy_process_group()
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        threading._shutdown()  # type: ignore[attr-defined]  # other threads are waited for, as at any exit
        os._exit(status)


def _live(script: dict[str, Any]) -> list[int]:
    """Exit statuses by rank."""
    port = free_port()
    ranks = {_fork(rank, script, port): rank for rank in range(len(script["nodes"]))}
    dying = {rank for rank, _, _ in script.get("deaths", ())}
    status: dict[int, int] = {}
    until = time.monotonic() + LIMIT_S
    while ranks:
        pid, how = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            rank = ranks.pop(pid)
            status[rank] = os.waitstatus_to_exitcode(how)
            dying.discard(rank)
            if status[rank]:
                grace_s = DYING_S if dying else script.get("grace_s", GRACE_S)
                until = min(until, time.monotonic() + grace_s)
        elif time.monotonic() > until:
            for left in ranks:
                os.kill(left, signal.SIGKILL)
            until = time.monotonic() + LIMIT_S
        else:
            time.sleep(0.01)
    return [status[rank] for rank in sorted(status)]


def main() -> None:
    for name in (*PRELOAD, "tiers.memory.life"):
        importlib.import_module(name)

    for line in sys.stdin:
        if line == END:
            return
        print(json.dumps(_live(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
