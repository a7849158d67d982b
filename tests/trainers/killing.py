"""Runs of a training script in processes of their own, which may be killed at any moment.

They are forked from a process that has imported what takes ten seconds: a run is `main(settings)` of a
module on some ranks, and what it prints is in a file.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from ports import free_port

TESTS = Path(__file__).parent.parent
WAIT_S = 600.0


class Launcher:
    """A process that has imported a module, and starts its runs."""

    def __init__(self, module: str, folder: Path) -> None:
        self._folder, self._runs = folder, 0
        jobs, answers = os.pipe(), os.pipe()
        fds = jobs[0], answers[1]
        for fd in fds:
            os.set_inheritable(fd, True)
        if len(os.listdir("/proc/self/task")) == 1:  # then it may be a fork of this one
            self._pid = os.fork()
            if not self._pid:
                os.close(jobs[1])
                os.close(answers[0])
                serve(module, *fds)
        else:
            path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
            command = [sys.executable, "-m", "trainers.killing", module, *map(str, fds)]
            env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
            self._pid = subprocess.Popen(command, pass_fds=fds, env=env).pid
        for fd in fds:
            os.close(fd)
        self._jobs, self._answers = os.fdopen(jobs[1], "w"), os.fdopen(answers[0])

    def _answer(self) -> Any:
        answer = self._answers.readline()
        assert answer, "the launcher has ended"
        return json.loads(answer)

    def run(self, settings: str, ranks: int = 1, losses: int = 0, seed: int = 0) -> list[str]:
        """What a run prints.  With `losses`, all its ranks are killed some moments after it has printed so
        many, one after the other, unless it has ended before."""
        self._runs += 1
        out = self._folder / f"run-{self._runs}.txt"
        out.touch()
        job = {"settings": settings, "ranks": ranks, "port": free_port(), "out": str(out)}
        self._jobs.write(json.dumps(job) + "\n")
        self._jobs.flush()
        pids = self._answer()
        if losses and self._has_printed(out, losses, pids):
            draw = random.Random(seed)
            for pid in draw.sample(pids, len(pids)):
                time.sleep(draw.random() * 0.03)
                _kill(pid)
        codes, text = self._answer(), out.read_text()
        killed = losses and -signal.SIGKILL in codes  # a rank may fail because the other is gone
        assert killed or not any(codes), f"{codes}\n{text[-6000:]}"
        return text.splitlines()

    def _has_printed(self, out: Path, losses: int, pids: list[int]) -> bool:
        """Wait until a run has printed so many losses; False if it ends before."""
        until = time.monotonic() + WAIT_S
        while out.read_text().count("\nL ") < losses:
            if not any(_is_running(pid) for pid in pids):
                return False
            assert time.monotonic() < until, out.read_text()[-6000:]
            time.sleep(0.005)
        return True

    def close(self) -> None:
        self._jobs.close()
        self._answers.close()
        os.waitpid(self._pid, 0)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _fork(module: Any, job: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        out = os.open(job["out"], os.O_WRONLY | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)  # pytest has its own
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
        if job["ranks"] > 1:
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(job["ranks"]),
                "LOCAL_WORLD_SIZE": str(job["ranks"]),
                "GROUP_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(job["port"]),
                "TORCHELASTIC_RUN_ID": "trainers",
            }
        module.main(job["settings"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve(name: str, jobs: int, answers: int) -> None:
    """Start runs, and tell their processes and their exit codes, until there are no more."""
    try:
        module = importlib.import_module(name)
        with os.fdopen(jobs) as asked, os.fdopen(answers, "w", buffering=1) as answer:
            for line in asked:
                job = json.loads(line)
                pids = [_fork(module, job, rank) for rank in range(job["ranks"])]
                answer.write(json.dumps(pids) + "\n")
                codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
                answer.write(json.dumps(codes) + "\n")
    finally:
        os._exit(0)


def losses(found: list[str]) -> dict[str, str]:
    """The losses that were printed, by what they are of: step and number of the batch."""
    parts = [line.split() for line in found if line.startswith("L ")]
    return {" ".join(key): value for _, *key, value in parts}


def value(found: list[str], mark: str) -> str:
    """The last line that begins so."""
    return [line for line in found if line.startswith(f"{mark} ")][-1]


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
