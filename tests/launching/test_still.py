"""Ranks that are still though the script is at work: the run goes on, and is told what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .test_run import environment

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.soak]

LAUNCHER = """
import sys
from holdfast.launch import command, hangs, workers
hangs.LEAST_HANG_S, hangs.HANG_STEPS, workers.UNSTEPPED_S = 2.0, 4, 4.0
sys.exit(command.main(sys.argv[1:]))
"""
"""`holdfast run` that waits less."""

EVALUATES = """
import sys, time
from pathlib import Path
import torch.distributed as dist
import holdfast

root = Path(sys.argv[1])

@holdfast.recoverable
def main():
    dist.init_process_group("gloo")
    with holdfast.Checkpointer(root / "root", {"progress": {"n": 1}}, every=1000) as ckpt:
        for step in range(1, 20):
            if step == 10 and dist.get_rank() == 0:
                with (root / "evaluations").open("a") as file:
                    file.write("x")
                time.sleep(10)  # as one that waits for another host's evaluation
            dist.barrier()
            time.sleep(0.05)
            ckpt.step(step)
    dist.destroy_process_group()

main()
"""


def ran(text: str, tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(text)
    command = [sys.executable, "-c", LAUNCHER, "--nproc-per-node=2", *options]
    return subprocess.run(
        [*command, str(script), str(tmp_path)],
        env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_a_wait_that_nobody_sees_does_not_end_the_run(tmp_path: Path) -> None:
    """Each time it has twice the time, costs no restart, and is no failure like the one before."""
    done = ran(EVALUATES, tmp_path, "--max-restarts=0")
    assert done.returncode == 0, done.stderr
    number = len((tmp_path / "evaluations").read_text())
    assert number > 1
    assert done.stderr.count("it hangs") >= number - 1
    assert done.stderr.count("from now on the limit without progress is") >= number - 1
    assert done.stderr.count("it needs a larger --hang-s") == 1


STALLS = """
import os, signal, sys, time
import torch.distributed as dist
import holdfast

@holdfast.recoverable
def main():
    dist.init_process_group("gloo")
    attempt, rank = os.environ["HOLDFAST_ATTEMPT"], dist.get_rank()
    if attempt == "2":
        time.sleep(100)  # as in a restore from storage that does not answer
    with holdfast.Checkpointer(sys.argv[1] + "/root", {"progress": {"n": 1}}, every=1000) as ckpt:
        for step in range(1, 6):
            dist.barrier()
            ckpt.step(step)
            time.sleep(0.5)
        if (attempt, rank) == ("1", 1):
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
    dist.destroy_process_group()

main()
"""


def test_a_stall_before_the_first_step_is_no_fault_of_a_new_process(tmp_path: Path) -> None:
    """It has done no step, and the others none in this attempt: nobody is behind."""
    done = ran(STALLS, tmp_path, "--max-restarts=1")
    assert done.returncode == 0, done.stderr
    assert "(before the first step of this attempt; to blame: all)" in done.stderr
    assert done.stderr.count("from now on the limit without progress is") == 1


def test_a_limit_that_was_asked_for_is_the_users_word(tmp_path: Path) -> None:
    done = ran(EVALUATES, tmp_path, "--hang-s=4")
    assert done.returncode == 1
    assert "3rd time in the same way, so the run ends" in done.stderr
    assert "from now on the limit without progress is" not in done.stderr
    assert done.stderr.count("it needs a larger --hang-s") == 1


TELLS_NO_STEP = """
import time
import torch.distributed as dist
import holdfast

@holdfast.recoverable
def main():
    dist.init_process_group("gloo")
    time.sleep(6)
    dist.destroy_process_group()

main()
"""


def test_a_script_that_tells_no_step_is_told_so(tmp_path: Path) -> None:
    done = ran(TELLS_NO_STEP, tmp_path, "--hang-s=2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no rank has called Checkpointer.step") == 1
