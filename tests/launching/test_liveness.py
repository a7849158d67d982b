"""What a worker tells its launcher beside steps: saves that are complete, and that it moves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from holdfast.launch.liveness import Commits, used_below_s


def test_a_save_that_a_newer_one_has_overtaken_is_no_commit() -> None:
    """A durable save takes longer than snapshots do."""
    commits = Commits()
    for at, saved in ((100, 100), (105, 105), (109, 100), (110, 110), (110, 110)):
        commits.at(1, at)
        commits.note(saved)
    assert commits.number == 3


def test_a_commit_counts_after_training_has_gone_back() -> None:
    commits = Commits()
    commits.at(1, 1000)
    commits.note(1000)
    commits.at(1, 501)  # it has restored an older step
    commits.note(501)
    assert commits.number == 2
    commits.at(1, 502)
    commits.note(501)
    assert commits.number == 2


def test_a_commit_of_a_new_attempt_counts_where_no_step_is_told() -> None:
    commits = Commits()
    for attempt, saved in ((1, 1000), (2, 500), (2, 500)):
        commits.at(attempt, 0)
        commits.note(saved)
    assert commits.number == 2


def test_the_processor_time_of_processes_below() -> None:
    """Also of those that a process has begun that only waits, and when they are gone."""
    before = used_below_s()
    busy = f"{sys.executable} -c 'while True: pass' & wait"
    shell = subprocess.Popen(["sh", "-c", busy], start_new_session=True)
    try:
        until = time.monotonic() + 60
        while used_below_s() - before < 0.2:
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
    assert used_below_s() >= before
    subprocess.run([sys.executable, "-c", "sum(range(10_000_000))"], check=True)
    assert used_below_s() - before > 0.05
