"""Nodes join a run and are lost at its end: it costs no restart, and nobody waits for who is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import holdfast
from ports import free_port

from .test_run import environment, until

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.soak]

Begin = Callable[..., tuple["subprocess.Popen[Any]", Path]]

LAUNCHER = """
import os, sys
from holdfast.launch import command
if "UNSAVED_S" in os.environ:
    from holdfast.launch import elastic_agent
    elastic_agent.UNSAVED_S = float(os.environ["UNSAVED_S"])
sys.exit(command.main(sys.argv[1:]))
"""
"""`holdfast run`; it may wait less for what is never saved."""

TRAINS = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import holdfast

root = Path(sys.argv[1])

@holdfast.recoverable
def main():
    dist.init_process_group("gloo")
    state = {"weights": torch.zeros(8)}
    with holdfast.Checkpointer(root / "root", state, every=holdfast.Every(durable=5)) as ckpt:
        step = int(ckpt.restore())
        size = dist.get_world_size()
        while True:
            stop = torch.tensor([float((root / "stop").exists())])
            dist.all_reduce(stop)
            if stop.item():
                break
            step += 1
            ckpt.step(step)
            (root / f"trains on {size}").touch()
            time.sleep(0.02)
    dist.destroy_process_group()

main()
"""


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Start launchers of one run, as of several nodes."""
    where = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=one"]
    launchers: list[subprocess.Popen[Any]] = []

    def start(text: str, *options: str, **variables: str) -> tuple[subprocess.Popen[Any], Path]:
        script, log = tmp_path / "script.py", tmp_path / f"log{len(launchers)}"
        script.write_text(text)
        command = [sys.executable, "-c", LAUNCHER, "--local-addr=127.0.0.1", *where]
        with log.open("w") as file:
            launchers.append(
                subprocess.Popen(
                    [*command, *options, str(script), str(tmp_path)],
                    env=environment() | variables, stdout=file, stderr=file, start_new_session=True,
                )
            )  # fmt: skip
        return launchers[-1], log

    yield start
    for launcher in launchers:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()


def test_joining_costs_no_restart(begin: Begin, tmp_path: Path) -> None:
    options = ("--nnodes=1:3", "--nproc-per-node=2", "--max-restarts=1")
    options += ("--rdzv-conf=last_call_timeout=1",)
    begun = []
    for num_nodes in (1, 2, 3):
        begun.append(begin(TRAINS, *options))
        until((tmp_path / f"trains on {2 * num_nodes}").exists)
    (tmp_path / "stop").touch()
    said = "\n".join(log.read_text() for _, log in begun)
    assert [launcher.wait(300) for launcher, _ in begun] == [0, 0, 0], said
    said = "\n".join(log.read_text() for _, log in begun)
    assert "a node waits to be taken in" in said
    assert "failed after step" not in said


SAVES_WHEN_TOLD = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import holdfast

root, is_marked = Path(sys.argv[1]), "MARKED" in os.environ

def main():
    dist.init_process_group("gloo")
    every = holdfast.Every(durable=1_000_000)
    state, grace_s = {"weights": torch.zeros(8)}, None if is_marked else 20
    with holdfast.Checkpointer(root / "root", state, every=every, sigterm_s=grace_s) as ckpt:
        step = int(ckpt.restore())
        while True:
            told = torch.tensor([float((root / name).exists()) for name in ("stop", "save")])
            dist.all_reduce(told)
            if told[0].item():
                break
            step += 1
            if told[1].item() and is_marked and step not in holdfast.steps(root / "root"):
                ckpt.save(step)
            ckpt.step(step)
            (root / f"trains on {dist.get_world_size()}").write_text(str(step))
            time.sleep(0.02)
    dist.destroy_process_group()

(holdfast.recoverable(main) if is_marked else main)()
"""
"""Makes no save but upon a word: that of the test if it is marked, else SIGTERM."""


def test_a_node_waits_for_a_save_of_a_script_that_counts_steps(
    begin: Begin, tmp_path: Path
) -> None:
    """What was done since the last save would be lost, and none need come within a minute."""
    options = ("--nnodes=1:2", "--rdzv-conf=last_call_timeout=1")
    begun = [begin(SAVES_WHEN_TOLD, *options, MARKED="1", UNSAVED_S="1")]
    until((tmp_path / "trains on 1").exists)
    begun.append(begin(SAVES_WHEN_TOLD, *options, MARKED="1", UNSAVED_S="1"))
    until(lambda: "a node waits to be taken in" in begun[0][1].read_text())
    time.sleep(4)  # four times as long as a script without steps is waited for
    assert not (tmp_path / "trains on 2").exists()
    (tmp_path / "save").touch()
    until((tmp_path / "trains on 2").exists)
    (tmp_path / "stop").touch()
    assert [launcher.wait(300) for launcher, _ in begun] == [0, 0], begun[0][1].read_text()
    assert "attempt 2 begins with 2 ranks" in begun[0][1].read_text()


def test_a_node_that_went_before_a_save_leaves_nothing_for_the_next_one(
    begin: Begin, tmp_path: Path
) -> None:
    """The save that it waited for is no reason to begin anew at once when another node comes."""
    options = ("--nnodes=1:2", "--rdzv-conf=last_call_timeout=1,keep_alive_max_attempt=3")
    first, log = begin(SAVES_WHEN_TOLD, *options, MARKED="1")
    until((tmp_path / "trains on 1").exists)
    gone, _ = begin(SAVES_WHEN_TOLD, *options, MARKED="1")
    until(lambda: "a node waits to be taken in" in log.read_text())
    gone.terminate()
    assert gone.wait(300) != 0
    time.sleep(8)  # the first one has missed three signs of life
    (tmp_path / "save").touch()
    until(lambda: holdfast.steps(tmp_path / "root"))
    (tmp_path / "save").unlink()
    saved = holdfast.steps(tmp_path / "root")
    time.sleep(1)
    assert "attempt 2" not in log.read_text()
    next_one, _ = begin(SAVES_WHEN_TOLD, *options, MARKED="1")
    until(lambda: log.read_text().count("a node waits to be taken in") == 2)
    time.sleep(2)
    assert not (tmp_path / "trains on 2").exists()
    (tmp_path / "save").touch()
    until((tmp_path / "trains on 2").exists)
    assert max(saved) < max(holdfast.steps(tmp_path / "root"))
    (tmp_path / "stop").touch()
    assert [first.wait(300), next_one.wait(300)] == [0, 0], log.read_text()


def test_a_node_that_waits_ends_with_the_run(begin: Begin, tmp_path: Path) -> None:
    """It is to be taken in at the next save, which does not come."""
    options = ("--nnodes=1:2", "--rdzv-conf=last_call_timeout=1")
    begun = [begin(SAVES_WHEN_TOLD, *options, MARKED="1")]
    until((tmp_path / "trains on 1").exists)
    begun.append(begin(SAVES_WHEN_TOLD, *options, MARKED="1"))
    until(lambda: "this node waits" in begun[1][1].read_text())
    (tmp_path / "stop").touch()
    assert [launcher.wait(300) for launcher, _ in begun] == [0, 0], begun[1][1].read_text()
    assert not (tmp_path / "trains on 2").exists()


def test_a_script_that_is_not_marked_saves_when_a_node_joins(begin: Begin, tmp_path: Path) -> None:
    options = ("--nnodes=1:2", "--nproc-per-node=2", "--rdzv-conf=last_call_timeout=1")
    begun = [begin(SAVES_WHEN_TOLD, *options)]
    until((tmp_path / "trains on 2").exists)
    begun.append(begin(SAVES_WHEN_TOLD, *options))
    until((tmp_path / "trains on 4").exists)
    before = int((tmp_path / "trains on 2").read_text())
    assert max(holdfast.steps(tmp_path / "root")) in (before, before + 1)
    (tmp_path / "stop").touch()
    assert [launcher.wait(300) for launcher, _ in begun] == [0, 0], begun[0][1].read_text()


LINGERS = """
import os, sys, time
from pathlib import Path
import torch.distributed as dist
import holdfast

root = Path(sys.argv[1])

@holdfast.recoverable
def main():
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()

main()
if "LINGERS" in os.environ:
    (root / "lingers").write_text(f"{os.getpid()} ")
    time.sleep(600)
"""


def test_a_node_that_is_lost_when_all_are_done_is_not_waited_for(
    begin: Begin, tmp_path: Path
) -> None:
    options = ("--nnodes=2", "--nproc-per-node=1")
    first, log = begin(LINGERS, *options, "--rdzv-conf=is_host=1")
    lost, _ = begin(LINGERS, *options, "--rdzv-conf=is_host=0", LINGERS="1")
    lingers = tmp_path / "lingers"
    until(lambda: lingers.exists() and lingers.read_text().endswith(" "))
    lost.kill()
    with suppress(ProcessLookupError):  # as its fork server may have done
        os.kill(int(lingers.read_text()), signal.SIGKILL)
    assert first.wait(300) == 0, log.read_text()
