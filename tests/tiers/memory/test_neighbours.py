"""Jobs of one user share the agent of a node.  What is done to it is told to each, and what a dead one left
is freed at once."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import zygote
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.client import Client
from tiers.memory.agents import await_gone, kill, pid_of, stop
from tiers.memory.test_agent_verb import agent, job_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


class Neighbour:
    """A job of its own (`tiers.memory.neighbour`)."""

    def __init__(self, node: Path, folder: Path, stop_at: int = 0) -> None:
        folder.mkdir()
        self.folder = folder
        self._out = folder / "out"
        self.process = zygote.start(
            ["-m", "tiers.memory.neighbour", folder, stop_at], out=self._out, err=folder / "err",
            env=os.environ | {"HOLDFAST_MEMORY_DIR": str(node), "HOLDFAST_HOST": "127.0.0.1"},
        )  # fmt: skip

    def told(self, what: str) -> list[Any]:
        """All that it wrote of a kind: `step`, `warning`, `stopped`."""
        text = self._out.read_text() if self._out.exists() else ""
        lines = [json.loads(x) for x in text.splitlines(keepends=True) if x.endswith("\n")]
        return [line[what] for line in lines if what in line]

    def await_(self, condition: Callable[[], object]) -> None:
        until = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < until and self.process.poll() is None, self.printed()
            time.sleep(0.02)

    def await_steps(self, number: int) -> None:
        """Until it has made some more steps."""
        at = len(self.told("step")) + number
        self.await_(lambda: len(self.told("step")) >= at)

    def end(self) -> None:
        (self.folder / "end").touch()
        assert self.process.wait(120) == 0, self.printed()

    def printed(self) -> str:
        return (self._out.read_text() + (self.folder / "err").read_text())[-4000:]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Path]:
    found = tmp_path / "node"
    yield found
    stop(found)


@pytest.fixture
def jobs(node: Path, tmp_path: Path) -> Iterator[Callable[..., Neighbour]]:
    made: list[Neighbour] = []

    def make(stop_at: int = 0) -> Neighbour:
        made.append(Neighbour(node, tmp_path / f"job{len(made)}", stop_at))
        return made[-1]

    yield make
    for one in made:
        one.process.kill()
        one.process.wait(60)


def by_kill(node: Path) -> str:
    kill(node)
    return "was killed, or crashed"


def by_sigterm(node: Path) -> str:
    os.kill(pid := pid_of(node), signal.SIGTERM)
    await_gone(pid)
    return "was ended by SIGTERM"


def by_stop(node: Path) -> str:
    pid, (status, said) = pid_of(node), agent(node, "stop")
    assert status == 0 and "another agent, and what this one held stays for it\n" in said
    await_gone(pid)
    return "was stopped by `holdfast agent stop`"


def by_freeing(node: Path) -> str:
    status, said = agent(node, "stop", "--free")
    assert status == 0 and "another agent, and what this one held is freed\n" in said
    return "was stopped by `holdfast agent stop --free`, which freed what it held"


@pytest.mark.soak_except("by_kill")
@pytest.mark.parametrize("end", [by_kill, by_sigterm, by_stop, by_freeing])
def test_every_job_is_told_how_the_agent_ended(
    node: Path, jobs: Callable[..., Neighbour], end: Callable[[Path], str]
) -> None:
    """In one sentence, once, with the process that has taken its place.  A save under way may fail."""
    both = [jobs(), jobs()]
    for job in both:
        job.await_steps(2)
    pid = pid_of(node)
    how = end(node)
    for job in both:
        job.await_(lambda job=job: job.told("warning"))
        job.await_steps(2)
    kept = "" if end is by_freeing else ", with the snapshots that it held"
    said = (
        f"the agent of this node, process {pid}, {how}: process {pid_of(node)} has taken its place"
    )
    for job in both:
        told = [text for text in job.told("warning") if "save of step" not in text]
        assert told == [said + kept]
    assert pid_of(node) != pid
    for job in both:
        job.end()


def test_stop_names_the_jobs_that_go_on(node: Path, jobs: Callable[..., Neighbour]) -> None:
    one = jobs()
    one.await_steps(2)
    name = job_of(node)
    status, said = agent(node, "stop", "--json")
    assert (status, json.loads(said)["running"]) == (0, [name])
    one.end()


@pytest.mark.soak_except("dies_later")
@pytest.mark.parametrize("goes_on", [False, True], ids=["dies_meanwhile", "dies_later"])
def test_a_dead_job_is_freed_though_its_agent_was_stopped(
    node: Path, jobs: Callable[..., Neighbour], goes_on: bool
) -> None:
    """The agent has written an image and was not told of its commit.  The step is deleted since, so nobody
    could commit it once more."""
    one = jobs(stop_at=3)
    one.await_(lambda: one.told("stopped"))
    pid = pid_of(node)
    try:
        one.await_(lambda: one.told("step") and one.told("step")[-1] >= 6)
        job = job_of(node)
        if not goes_on:
            one.process.kill()
            one.process.wait(60)
    finally:
        os.kill(pid, signal.SIGCONT)
    if goes_on:
        client = Client(node)
        one.await_(lambda: steps_held(client) and min(steps_held(client)) > 3)
        one.process.kill()
        one.process.wait(60)
    status, said = agent(node, "clean", "--job", job)
    while goes_on and "is writing its step" in said:  # it went on until it was killed
        status, said = agent(node, "clean", "--job", job)
    assert (status, said) == (0, f"1 job freed: {job}\n")
    assert not list((node / "jobs").iterdir())
    left = json.loads(agent(node, "status", "--json")[1])
    assert left["used"] == 0


def steps_held(client: Client) -> tuple[int, ...]:
    """Steps of the newest snapshots of the node's one job."""
    report: w.AgentReport = client.ask(w.Status(), w.AgentReport)
    return report.jobs[0].steps
