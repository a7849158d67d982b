"""Agents of tests: real processes in directories of their own."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.base.host import start_time
from holdfast.core.codec.digest import hexdigest
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.client import Client
from holdfast.tiers.memory.node.segment import mapped, with_table

JOB = "0123456789abcdef"


def pid_of(root: Path) -> int:
    """The agent's process."""
    return int(json.loads((root / "agent.json").read_text())["pid"])


def is_gone(pid: int) -> bool:
    """Whether a process has ended, waited for or not."""
    return start_time(pid) is None


def await_gone(pid: int, limit_s: float = 120.0) -> None:
    until = time.monotonic() + limit_s
    while not is_gone(pid):
        assert time.monotonic() < until, f"process {pid} is still there"
        time.sleep(0.02)


def kill(root: Path) -> None:
    """SIGKILL to the agent."""
    pid = pid_of(root)
    os.kill(pid, signal.SIGKILL)
    await_gone(pid)


def stop(root: Path, *, free: bool = True) -> None:
    """End the agent if one runs, however slow a busy machine makes its answers."""
    client = Client(root, deadline_s=120.0)
    if client.look() == "nobody":
        return
    pid = pid_of(root)
    client.ask(w.Stop(free=free))
    await_gone(pid)


def trainers(root: Path) -> list[int]:
    """The processes of the one job there."""
    (note,) = root.glob("jobs/*/job.json")
    return [int(pid) for pid in json.loads(note.read_bytes())["trainers"]]


def kill_together(pids: Iterable[int]) -> None:
    """SIGKILL to processes none of which may see another one die before it dies."""
    pids = list(pids)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)


@contextmanager
def agent(root: Path, budget: int = 1 << 30, *, tls: bool = False) -> Iterator[Client]:
    """An agent and a line to it; both end with the block."""
    client = Client(root, deadline_s=120.0)
    client.start("127.0.0.1", budget, tls=tls)
    try:
        yield client
    finally:
        stop(root, free=False)
        await_gone(pid_of(root))


def hello(
    client: Client, run: int = 1, rank: int = 0, pid: int | None = None, **more: Any
) -> w.Held:
    pid = pid or os.getpid()
    said = {"root": "file:///x", **more}
    client.ask(
        w.Hello(JOB, run=run, rank=rank, pid=pid, started=start_time(pid) or "0", **said), w.Card
    )
    held: w.Held = client.ask(w.Ask(JOB), w.Held)
    return held


def put(
    client: Client,
    attempt: str,
    data: bytes,
    *,
    rank: int = 0,
    step: int = 1,
    commit: bool = True,
    pid: int | None = None,
) -> w.Lease:
    """An image of `data` with its table, digested and committed."""
    size = with_table(len(data))
    take = w.Take(JOB, pid or os.getpid(), "share", rank, attempt, step, size)
    lease: w.Lease = client.ask(take, w.Lease)
    with mapped(client.root / "jobs" / JOB / lease.name, size) as view:
        view[: len(data)] = data
    digest = client.ask(w.Ready(JOB, lease.name, attempt, len(data), size), str)
    with mapped(client.root / "jobs" / JOB / lease.name, size) as view:
        assert digest == hexdigest(view[len(data) :])
    if commit:
        client.ask(w.Commit(JOB, attempt, step, b"manifest " + attempt.encode()))
    return lease


def noise(size: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)
