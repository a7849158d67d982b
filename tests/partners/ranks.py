"""Ranks of which one lets the others down, in a public call; what becomes of the others, as JSON lines.

    python -m partners.ranks FOLDER save-never-0 load-stopped-1 step+memory+delta-dies-1 ...

A case names the call and what the Checkpointer has beside storage, what the victim does, and which rank it
is.  *never*: it does not make the call.
*stopped*, *dies*: it gets SIGSTOP or SIGKILL where it would make it.  *stops*, *killed*: the same, where
all have come to the call and it goes on by itself.  Ranks are forked from this process, which has imported
torch; the cases given run side by side.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # two seconds for each rank, else
import torch.distributed as dist
from torch import nn

import holdfast
import holdfast.checkpointer
import holdfast.once
from holdfast.group import Group
from holdfast.memory.node import words
from holdfast.memory.node.client import Client
from holdfast.writers import ranks as converting
from ports import free_port

RANKS = 3
DEADLINE_S = 4.0
BOUND_S = 150.0
"""How long a case may take beyond the deadline on a machine that does much else; then it has hung."""
SIGNALS = {
    "stopped": signal.SIGSTOP,
    "stops": signal.SIGSTOP,
    "dies": signal.SIGKILL,
    "killed": signal.SIGKILL,
}


@dataclass(frozen=True)
class Case:
    """One call with one victim."""

    call: str
    fate: str
    victim: int
    tiers: tuple[str, ...] = ()

    @staticmethod
    def parse(text: str) -> Case:
        call, fate, victim = text.split("-")
        call, *tiers = call.split("+")
        return Case(call, fate, int(victim), tuple(tiers))

    def __str__(self) -> str:
        return f"{'+'.join((self.call, *self.tiers))}-{self.fate}-{self.victim}"


class Run:
    """What a rank holds."""

    def __init__(self, root: str, tiers: tuple[str, ...]) -> None:
        self.root = root
        self.memory = holdfast.Memory("none") if "memory" in tiers else None
        self.delta = holdfast.Delta() if "delta" in tiers else None
        torch.manual_seed(0)  # ranks have replicas
        self.model = nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state: dict[str, Any] = {"model": self.model, "seen": dist.get_rank()}
        if self.delta is not None:
            self.state["optim"] = self.optimizer
        self.ckpt: holdfast.Checkpointer | None = None

    def open(self, every: int | None = None) -> holdfast.Checkpointer:
        frequency = None if every is None else holdfast.Every(durable=every)
        if self.delta is not None and every is not None:
            frequency = holdfast.Every(durable=every, delta=1)
        return holdfast.Checkpointer(
            self.root,
            self.state,
            every=frequency,
            memory=self.memory,
            delta=self.delta,
            on_error="raise",
            deadline_s=DEADLINE_S,
        )

    def train(self) -> None:
        """A step of this rank alone."""
        self.model(torch.ones(1, 8)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def save(run: Run) -> None:
    holdfast.save(run.root, run.state, step=2, deadline_s=DEADLINE_S)


def load(run: Run) -> None:
    holdfast.load(run.root, {"model": run.model}, deadline_s=DEADLINE_S)


def construct(run: Run) -> None:
    run.open()


def restore(run: Run) -> None:
    assert run.ckpt is not None
    run.ckpt.restore()


def save_in_background(run: Run) -> None:
    assert run.ckpt is not None
    run.ckpt.save(2).wait()


def step(run: Run) -> None:
    assert run.ckpt is not None
    run.ckpt.step(2)
    run.ckpt.wait()


def steps(run: Run) -> None:
    """Several, of which no save is due; all are recorded after the first."""
    assert run.ckpt is not None
    run.ckpt.every = holdfast.Every(durable=1000, delta=1)
    for step in range(2, 8):
        run.train()
        run.ckpt.step(step)
    run.ckpt.wait()


def wait(run: Run) -> None:
    """For a save that was begun before."""
    assert run.ckpt is not None
    run.ckpt.save(2)
    run.ckpt.wait()


def close(run: Run) -> None:
    """With a save under way that the victim has no part in."""
    assert run.ckpt is not None
    run.ckpt.save(2)
    run.ckpt.close()


def convert(run: Run) -> None:
    holdfast.convert(run.root, f"{run.root}-new")


CALLS: dict[str, tuple[Callable[[Run], None], str]] = {
    "save": (save, "save()"),
    "load": (load, "load()"),
    "construct": (construct, "Checkpointer()"),
    "restore": (restore, "restore()"),
    "background": (save_in_background, "the save of step 2"),
    "step": (step, "the save of step 2"),
    "steps": (steps, ""),
    "wait": (wait, "the save of step 2"),
    "close": (close, ""),
    "convert": (convert, "convert()"),
}
"""Each call, and what a message says when it is awaited."""
WITH_CHECKPOINTER = ("restore", "background", "step", "steps", "wait", "close")


def node_of(root: Path) -> Path:
    """Where a case's agent has its memory: a short path, for a socket's name has little room."""
    return Path("/dev/shm") / f"hf-{hashlib.sha256(str(root).encode()).hexdigest()[:16]}"


def rank_of(case: Case, rank: int, port: int, root: str) -> dict[str, Any]:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "GLOO_SOCKET_IFNAME": "lo",
        "HOLDFAST_MEMORY_DIR": str(node_of(Path(root))),
    }
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run = Run(root, case.tiers)
    holdfast.save(root, run.state, step=1)
    converting.MEET_S = converting.SILENT_S = DEADLINE_S
    if case.call in WITH_CHECKPOINTER:
        run.ckpt = run.open(every=1)
    dist.barrier()
    if rank == case.victim:
        let_down(case)
    begun = time.monotonic()
    try:
        CALLS[case.call][0](run)
        error = ""
    except holdfast.HoldfastError as failed:
        error = f"{type(failed).__name__}: {failed}"
    return {"rank": rank, "error": error, "took_s": time.monotonic() - begun}


def let_down(case: Case) -> None:
    if case.fate == "never":
        signal.pause()
    if case.fate in ("stopped", "dies"):
        os.kill(os.getpid(), SIGNALS[case.fate])
    together = Group.together

    def then(group: Group, call: str) -> None:
        together(group, call)
        os.kill(os.getpid(), SIGNALS[case.fate])

    Group.together = then  # type: ignore[method-assign]


def forked(case: Case, rank: int, port: int, folder: Path) -> int:
    """A process that is this rank; it writes what it has seen to a file."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        log = os.open(folder / f"{case}.{rank}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        found = rank_of(case, rank, port, str(folder / str(case)))
        written = folder / f"{case}.{rank}.part"
        written.write_text(json.dumps(found))
        written.rename(written.with_suffix(".json"))
        signal.pause()  # whoever ends takes what it hosts with it
    except BaseException:
        import traceback

        traceback.print_exc()
    os._exit(1)


def await_all(pids: dict[tuple[Case, int], int], folder: Path) -> None:
    """Until all but the victims have said how they fared, or the bound is over; then end every process."""
    until = time.monotonic() + DEADLINE_S + BOUND_S
    awaited = {folder / f"{case}.{rank}.json" for case, rank in pids if rank != case.victim}
    while time.monotonic() < until and not all(path.exists() for path in awaited):
        time.sleep(0.02)
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def stop_agent(node: Path) -> None:
    """What the ranks of a case had started."""
    client = Client(node, deadline_s=BOUND_S)
    if client.is_there():
        client.ask(words.Stop(free=True))


def main() -> None:
    warnings.simplefilter("ignore")
    folder, cases = Path(sys.argv[1]), [Case.parse(text) for text in sys.argv[2:]]
    pids = {}
    for case in cases:
        port = free_port()
        for rank in range(RANKS):
            pids[case, rank] = forked(case, rank, port, folder)
    try:
        await_all(pids, folder)
    finally:
        for case in cases:
            stop_agent(node_of(folder / str(case)))
            shutil.rmtree(node_of(folder / str(case)), ignore_errors=True)
    for case in cases:
        for rank in range(RANKS):
            seen, log = (folder / f"{case}.{rank}.{kind}" for kind in ("json", "log"))
            found = json.loads(seen.read_text()) if seen.exists() else {"rank": rank}
            text = log.read_text(errors="replace") if log.exists() else ""
            print(json.dumps({"case": str(case), "log": text, **found}), flush=True)


if __name__ == "__main__":
    main()
