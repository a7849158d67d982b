"""Ranks that are forked from a process which has imported what takes ten seconds, and that may be killed.

with Ranks("integrations.trainers.train_deepspeed", log) as ranks:
    pids = ranks.start({"steps": 3}, 2)      # main({"steps": 3}) on two ranks
    ranks.codes(pids)                        # None for those that run, as of subprocess.Popen.poll
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from ports import free_port
from tiers.memory.agents import kill
from zygote import PRELOAD

TESTS = Path(__file__).parents[2]
TORCHRUNS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that a trainer leaves behind in the process of a test, and that no rank may inherit."""
DEADLINE_S = 400
"""Seconds that a run may take: less than its test, which says nothing of what hangs."""


class Ranks:
    """A process that has imported a module, and forks ranks, each of which calls its `main`.

    `is_group_of_one`: a rank that is alone has torchrun's variables, too, and can make a process group.
    """

    def __init__(
        self, module: str, log: Path, *, is_group_of_one: bool = False, **env: str
    ) -> None:
        self.log, self._is_group_of_one, self._num_printing = log, is_group_of_one, 0
        self.num_kills = 0
        """Number of runs that `printed` has killed."""
        path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        inherited = {k: v for k, v in os.environ.items() if k not in TORCHRUNS}
        own = {
            "PYTHONPATH": path.rstrip(os.pathsep),
            "HOLDFAST_MEMORY_DIR": str(log.parent / "node"),
        }
        known = inherited | {"OMP_NUM_THREADS": "1", **own, **env}
        self._node = Path(known["HOLDFAST_MEMORY_DIR"])
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "integrations.trainers.forked", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=known | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                text=True,
            )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)
        self._process.stdout.close()
        with suppress(FileNotFoundError, ProcessLookupError):
            kill(self._node)  # it keeps the snapshots of a run that was killed for a day

    def _ask(self, what: str, *given: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([what, *given]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, self.errors()
        return json.loads(answer)

    def start(self, options: Any, num: int = 1, out: Path | None = None) -> list[int]:
        """Fork so many ranks; return their processes.  What they print is in `out`, or in the log."""
        env = {}
        if num > 1 or self._is_group_of_one:
            env = {"WORLD_SIZE": str(num), "LOCAL_WORLD_SIZE": str(num), "GROUP_RANK": "0"}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            env |= {"TORCHELASTIC_RUN_ID": "trainers"}
        found: list[int] = self._ask("start", options, num, env, str(out or ""))
        return found

    def codes(self, pids: list[int]) -> list[int | None]:
        """Exit codes, negative for a signal; None for processes that run."""
        found: list[int | None] = self._ask("codes", pids)
        return found

    def wait(self, pids: list[int]) -> list[int]:
        """Wait until all have ended; return their exit codes.  Once one failed, the others are killed."""
        until = time.monotonic() + DEADLINE_S
        while None in (codes := self.codes(pids)):
            if time.monotonic() > until:
                for pid, code in zip(pids, codes):
                    if code is None:
                        os.kill(pid, signal.SIGUSR1)  # it prints its stacks
                time.sleep(2)
                self.kill(pids)
                raise AssertionError(f"{codes} after {DEADLINE_S} s:\n{self.errors()}")
            if any(codes):
                self.kill(pids)
            time.sleep(0.02)
        return [code for code in codes if code is not None]

    def run(self, options: Any, num: int = 1) -> list[int]:
        """Run to any end; return the exit codes."""
        return self.wait(self.start(options, num))

    def die(self, options: Any, num: int = 1) -> None:
        """Run ranks that kill themselves; none may end in any other way."""
        codes = self.run(options, num)
        assert codes == [-signal.SIGKILL] * num, f"{codes}:\n{self.errors()}"

    def finish(self, options: Any, num: int) -> None:
        """Run to the end, which must be a good one."""
        codes = self.run(options, num)
        assert not any(codes), f"ranks ended with {codes}:\n{self.errors()}"

    def kill(self, pids: list[int]) -> None:
        """SIGKILL those that run, in this order."""
        for pid, code in zip(pids, self.codes(pids)):
            if code is None:
                os.kill(pid, signal.SIGKILL)
        while None in self.codes(pids):
            time.sleep(0.01)

    def errors(self) -> str:
        return self.log.read_text()[-6000:]

    def printed(
        self, options: Any, num: int = 1, losses: int = 0, seed: int = 0, *, dies: bool = False
    ) -> list[str]:
        """Return the lines that a run prints.  With `losses`, all its ranks are killed, one after the
        other, some moments after it has printed so many, unless it has ended before.  With `dies`, they
        may kill themselves."""
        self._num_printing += 1
        out = self.log.with_name(f"printed-{self._num_printing}")
        out.touch()
        pids = self.start(options, num, out)
        is_killed = False
        if losses and self._has_printed(out, losses, pids):
            draw = random.Random(seed)
            for pid in draw.sample(pids, num):
                time.sleep(draw.random() * 0.03)
                if self.codes([pid]) == [None]:
                    os.kill(pid, signal.SIGKILL)
                    is_killed = True
        codes, text = self.wait(pids), out.read_text()
        self.num_kills += is_killed
        is_killed = is_killed or (dies and codes == [-signal.SIGKILL] * num)
        assert is_killed or not any(codes), f"{codes}\n{text[-6000:]}"
        return text.splitlines()

    def _has_printed(self, out: Path, losses: int, pids: list[int]) -> bool:
        """Wait until a run has printed so many losses; False if it ends before."""
        until = time.monotonic() + DEADLINE_S
        while out.read_text().count("\nL ") < losses:
            if None not in self.codes(pids):
                return False
            assert time.monotonic() < until, out.read_text()[-6000:]
            time.sleep(0.005)
        return True


def losses(found: list[str]) -> dict[str, str]:
    """The losses that were printed, by what they are of: step and number of the batch.  AssertionError if
    one that was printed again, after a kill, was another."""
    printed: dict[str, str] = {}
    for _, *key, value in (line.split() for line in found if line.startswith("L ")):
        name = " ".join(key)
        assert printed.setdefault(name, value) == value, name
    return printed


def value(found: list[str], mark: str) -> str:
    """The last line that begins so."""
    return [line for line in found if line.startswith(f"{mark} ")][-1]


def serve(name: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed by ranks, and by packages as they are imported, is no answer
    module = importlib.import_module(name)
    for other in PRELOAD:
        importlib.import_module(other)
    ended: dict[int, int] = {}
    for line in sys.stdin:
        what, *given = json.loads(line)
        if what == "start":
            options, num, env, out = given
            answer: list[Any] = [_fork(module, options, rank, env, out) for rank in range(num)]
        else:
            for pid in given[0]:
                if pid not in ended and (status := os.waitpid(pid, os.WNOHANG))[0]:
                    ended[pid] = os.waitstatus_to_exitcode(status[1])
            answer = [ended.get(pid) for pid in given[0]]
        print(json.dumps(answer), file=answers, flush=True)


def _fork(module: Any, options: Any, rank: int, env: dict[str, str], out: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    faulthandler.register(signal.SIGUSR1)
    try:
        if env:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), **env}
        if out:
            file = os.open(out, os.O_WRONLY | os.O_APPEND)
            os.dup2(file, 1)
            os.dup2(file, 2)
        sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
        module.main(options)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
