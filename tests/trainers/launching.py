"""Runs of trainers in processes of their own, forked from one that has imported what takes ten seconds.

A run is a module's `main(options)` on some ranks, each a process that may be killed as any other.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from ports import free_port

TESTS = Path(__file__).parent.parent
DEADLINE_S = 600


class Launcher:
    """A process that has imported a module, and starts its runs."""

    def __init__(self, module: str, log: Path) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *_given()])}
        env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trainers.launching", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=env,
            text=True,
        )

    def run(self, options: dict[str, Any], ranks: int = 1) -> list[int]:
        """Run on so many ranks; return their exit codes, negative for a signal.  A rank that has not ended
        when another one was killed is killed, too."""
        assert self._process.stdin is not None and self._process.stdout is not None
        job = {"options": options, "ranks": ranks, "port": free_port()}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the launcher has ended: see {self._log.name}"
        codes: list[int] = json.loads(answer)
        return codes

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)
        self._log.close()


def _given() -> list[str]:
    return [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]


def _rank(module: Any, job: dict[str, Any], rank: int) -> None:
    if job["ranks"] > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(job["ranks"]),
            "LOCAL_WORLD_SIZE": str(job["ranks"]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(job["port"]),
        }
    module.main(job["options"])


def _fork(module: Any, job: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _rank(module, job, rank)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pids: list[int]) -> list[int]:
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        pid, status = os.wait()
        if pid not in pids:
            continue
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid] != 0:
            for other in pids:
                if other not in codes:
                    os.kill(other, 9)
    return [codes[pid] for pid in pids]


def serve(name: str) -> None:
    module = importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a run prints is no answer
    for line in sys.stdin:
        job = json.loads(line)
        pids = [_fork(module, job, rank) for rank in range(job["ranks"])]
        answers.write(json.dumps(_wait(pids)) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1])
