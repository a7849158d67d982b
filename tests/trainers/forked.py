"""Ranks that are forked from a process which has imported what takes ten seconds, and that may be killed.

with Ranks("trainers.train_deepspeed", log) as ranks:
    pids = ranks.start({"steps": 3}, 2)      # main({"steps": 3}) on two ranks
    ranks.codes(pids)                        # None for those that run, as of subprocess.Popen.poll
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from ports import free_port

TESTS = Path(__file__).parent.parent
PRELOAD = (
    "torch._dynamo",
    "holdfast.checkpointer",
    "holdfast.once",
    "holdfast.restart",
    "holdfast.looking",
)
"""What a rank would import when it makes an optimizer, or restores: seconds each time."""
DEADLINE_S = 900


class Ranks:
    """A process that has imported a module, and forks ranks, each of which calls its `main`."""

    def __init__(self, module: str, log: Path, **env: str) -> None:
        self.log = log
        known = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS), **env}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trainers.forked", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("ab"),
            env=known | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            text=True,
        )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)

    def _ask(self, what: str, *given: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([what, *given]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, self.errors()
        return json.loads(answer)

    def start(self, options: dict[str, Any], ranks: int) -> list[int]:
        """Fork the ranks; return their processes."""
        found: list[int] = self._ask("start", options, ranks, free_port())
        return found

    def codes(self, pids: list[int]) -> list[int | None]:
        """Exit codes, negative for a signal; None for processes that run."""
        found: list[int | None] = self._ask("codes", pids)
        return found

    def finish(self, options: dict[str, Any], ranks: int) -> None:
        """Run to the end, which must be a good one."""
        pids = self.start(options, ranks)
        until = time.monotonic() + DEADLINE_S
        while None in (codes := self.codes(pids)):
            if any(codes) or time.monotonic() > until:
                break
            time.sleep(0.05)
        if any(code != 0 for code in codes):
            self.kill(pids)
            raise AssertionError(f"ranks ended with {codes}:\n{self.errors()}")

    def kill(self, pids: list[int]) -> None:
        """SIGKILL those that run, in this order."""
        for pid, code in zip(pids, self.codes(pids)):
            if code is None:
                os.kill(pid, 9)
        while None in self.codes(pids):
            time.sleep(0.01)

    def errors(self) -> str:
        return self.log.read_text()[-6000:]


def serve(name: str) -> None:
    module = importlib.import_module(name)
    for other in PRELOAD:
        importlib.import_module(other)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ranks print is no answer
    ended: dict[int, int] = {}
    for line in sys.stdin:
        what, *given = json.loads(line)
        if what == "start":
            options, ranks, port = given
            answer: list[Any] = [_fork(module, options, rank, ranks, port) for rank in range(ranks)]
        else:
            for pid in given[0]:
                if pid not in ended and (status := os.waitpid(pid, os.WNOHANG))[0]:
                    ended[pid] = os.waitstatus_to_exitcode(status[1])
            answer = [ended.get(pid) for pid in given[0]]
        print(json.dumps(answer), file=answers, flush=True)


def _fork(module: Any, options: dict[str, Any], rank: int, ranks: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    code = 1
    try:
        module.main(options)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
