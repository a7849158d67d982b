"""`holdfast agent`, as it is typed, on what real trainings have left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.base.sizes import size_text
from holdfast.tiers.memory.node import messages as w
from tiers.memory import agents
from tiers.memory.agents import await_gone, is_gone, kill, pid_of
from tiers.memory.zygote import Lives, train

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CLI = "from holdfast.cli.main import main; main()"


def agent(node: Path, *words: str) -> tuple[int, str]:
    """Status and output of `holdfast agent ...` on a node."""
    done = subprocess.run(
        [sys.executable, "-c", CLI, "agent", *words], capture_output=True, text=True, timeout=400,
        env=os.environ | {"HOLDFAST_MEMORY_DIR": str(node), "COLUMNS": "200"},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def job_of(node: Path) -> str:
    (folder,) = (node / "jobs").iterdir()
    return folder.name


def test_what_a_dead_agent_and_dead_processes_left_is_freed(lives: Lives) -> None:
    """Nobody is there any more, only memory: `clean` finds it."""
    train(lives, 3, [0, 1], options={"redundancy": "none"})
    node = lives.node(0)
    kill(node)
    job = job_of(node)
    assert sum(p.stat().st_size for p in (node / "jobs" / job).glob("share-*-?")) > 1_000_000
    left = sum(p.stat().st_size for p in (node / "jobs" / job).iterdir())
    said = f"earlier agents left {size_text(left)} there; `holdfast agent clean` frees them"
    assert agent(node, "status") == (1, f"no agent at {node}\n{said}\n")
    told = {"running": False, "directory": str(node), "bytes": left}
    assert json.loads(agent(node, "status", "--json")[1]) == told
    status, said = agent(node, "clean", "--job", "another")
    assert status == 2 and "job another is not known here" in said
    assert agent(node, "clean") == (0, f"1 job freed: {job}\n")
    assert not list((node / "jobs").iterdir()) and not list((node / "gone").iterdir())
    assert agent(node, "clean") == (0, "0 jobs freed\n")
    assert agent(node, "status") == (1, f"no agent at {node}\n")  # none was started for that


def test_a_job_that_runs_is_spared_where_the_agent_is_dead(lives: Lives) -> None:
    """Its next snapshot would find another agent, and its memory."""
    node = lives.node(0)
    with training(lives, steps=1, pause=600) as pid:
        kill(node)
        job = job_of(node)
        assert agent(node, "clean") == (0, "0 jobs freed\n")
        status, said = agent(node, "clean", "--job", job)
        assert status == 2 and f"job {job} has running processes: {pid}" in said
        assert list((node / "jobs" / job).glob("share-*-?"))
    assert agent(node, "clean", "--job", job) == (0, f"1 job freed: {job}\n")


def test_status_shows_what_is_left_and_stop_frees_it(lives: Lives) -> None:
    """The processes are dead, their agent is not."""
    train(lives, 3, [0], options={"redundancy": "none"})
    node = lives.node(0)
    job, pid = job_of(node), pid_of(node)
    until = time.monotonic() + 120
    while True:  # it looks each second
        status, shown = agent(node, "status", "--json")
        told = json.loads(shown)
        (one,) = told["jobs"]
        if not one["trainers"]:
            break
        assert time.monotonic() < until
    assert (status, told["running"], told["pid"]) == (0, True, pid)
    assert (one["job"], one["trainers"], one["steps"]) == (job, [], [2, 3])
    assert one["root"] == f"file://{lives.place}/root" and one["images"] == 2
    assert told["used"] == one["bytes"] > 1_000_000
    status, shown = agent(node, "status")
    (row,) = [line for line in shown.splitlines() if job in line]
    assert "none, since" in row and "2, 3" in row
    assert agent(node, "stop") == (0, "stopped\n")  # what it holds stays
    await_gone(pid)
    assert job_of(node) == job
    assert agent(node, "start")[0] == 0
    pid = pid_of(node)
    assert agent(node, "stop", "--free") == (0, "stopped\n")
    await_gone(pid)
    assert not list((node / "jobs").iterdir())


@contextmanager
def training(lives: Lives, steps: int = 3, pause: float = 0.05) -> Iterator[int]:
    """One that has made snapshots at some steps, and goes on until the end of the block; its process.
    `pause`: seconds between its steps."""
    with ThreadPoolExecutor(1) as pool:
        script = {"until": 10**6, "pause": pause, "options": {"redundancy": "none"}}
        out, until = lives.place / f"life{lives.number + 1}" / "r0.jsonl", time.monotonic() + 120
        living = pool.submit(lives.live, nodes=[0], **script)
        while not out.exists() or f'"step": {steps}' not in out.read_text():
            assert time.monotonic() < until and not living.done(), lives.errors()
            time.sleep(0.05)
        (note,) = lives.node(0).glob("jobs/*/job.json")
        (pid,) = map(int, json.loads(note.read_bytes())["trainers"])
        try:
            yield pid
        finally:
            os.kill(pid, signal.SIGKILL)
            living.result()


def test_what_runs_is_shown_and_not_freed(lives: Lives) -> None:
    """Until it is dead, and the agent has noticed."""
    node = lives.node(0)
    with training(lives) as pid:
        job = job_of(node)
        assert json.loads(agent(node, "status", "--json")[1])["jobs"][0]["trainers"] == [pid]
        shown = agent(node, "status")[1]
        assert "1 process" in next(line for line in shown.splitlines() if job in line)
        assert agent(node, "clean") == (0, "0 jobs freed\n")
        status, said = agent(node, "clean", "--job", job)
        assert status == 2 and f"job {job} has running processes" in said
        assert not is_gone(pid) and job_of(node) == job
    until = time.monotonic() + 120
    while agent(node, "clean", "--job", job) != (
        0,
        f"1 job freed: {job}\n",
    ):  # it looks each second
        assert time.monotonic() < until
    assert not list((node / "jobs").iterdir())


def test_one_that_a_training_has_started_stays_when_it_is_told_to(tmp_path: Path) -> None:
    """What it cannot take over is refused."""
    with agents.agent(tmp_path, budget=1 << 20) as client:
        pid = pid_of(tmp_path)
        for more in (["--host", "10.1.2.3"], ["--tls"]):
            status, said = agent(tmp_path, "start", "--budget", "5MB", *more)
            assert status == 2 and f"process {pid}, serves at 127.0.0.1:" in said
        assert client.ask(w.Status(), w.AgentReport).budget == 1 << 20
        status, said = agent(tmp_path, "start", "--budget", "5MB", "--host", "127.0.0.1")
        assert status == 0 and "0 B of 5.00 MB in use" in said
        status, said = agent(tmp_path, "run")
        assert status == 2 and f"has an agent already, process {pid}" in said
        assert pid_of(tmp_path) == pid and client.look() == "there"


@pytest.mark.parametrize(
    ("action", "option"),
    [
        ("stop", ["--job", "x"]),
        ("clean", ["--budget", "1GB"]),
        ("run", ["--free"]),
        ("start", ["--free"]),
    ],
)
def test_an_option_of_another_action_is_refused(
    tmp_path: Path, action: str, option: list[str]
) -> None:
    status, said = agent(tmp_path, action, *option)
    assert status == 2 and f"`holdfast agent {action}` has no {option[0]}" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.soak
def test_a_silent_agent_is_told_from_none(lives: Lives) -> None:
    node = lives.node(0)
    assert agent(node, "start")[0] == 0
    pid = pid_of(node)
    os.kill(pid, signal.SIGSTOP)
    try:
        for action in ("status", "stop"):
            status, said = agent(node, action)
            assert status == 1 and f"process {pid}, does not answer" in said
            assert f"kill -9 {pid}" in said
    finally:
        os.kill(pid, signal.SIGCONT)
