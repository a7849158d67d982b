"""Starts a module of this package under torchrun, as real processes, and cannot hang.

    ran = launch("matrix", 4, "save", root)
    ran.check()                     # every rank ended with exit status 0, else its output is shown

A worker module does many cases and writes what it found under `out`; the tests assert on that.  Torchrun
and ranks are forked from a process that has imported torch (see `zygote` and `forking`), but for those of
launches that are not `forked`: each of their processes takes five seconds to import.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import zygote

TESTS = Path(__file__).parents[2]
LIMIT_S = 500.0
"""Far more than any launch takes; a test has 600 s."""


@dataclass(frozen=True)
class Ran:
    """An ended launch: torchrun's exit status (None: it was killed) and what each rank printed."""

    status: int | None
    output: dict[int, str]
    torchrun: str

    def check(self) -> None:
        """Fail with the ranks' output unless all went well."""
        if self.status != 0:
            how = "was killed at its time limit" if self.status is None else f"ended {self.status}"
            texts = [f"--- rank {rank}\n{text[-4000:]}" for rank, text in self.output.items()]
            raise AssertionError("\n".join([f"torchrun {how}", self.torchrun[-1500:], *texts]))


def launch(
    module: str, num_ranks: int, *args: object, timeout_s: float = LIMIT_S, forked: bool = True
) -> Ran:
    """Run `tests/system/distributed<module>.py` on `num_ranks` ranks; kills all of it after `timeout_s`.

    A module of another folder of tests goes by its dotted name.
    """
    words = [f"--nproc-per-node={num_ranks}", "--standalone", "--redirects=3"]
    named = ["-m", module if "." in module else f"system.distributed.{module}", *map(str, args)]
    with tempfile.TemporaryDirectory(prefix="holdfast-launch-") as logs:
        words += [f"--log-dir={logs}", *named]
        out = Path(logs, "torchrun")
        started: zygote.Program | subprocess.Popen[bytes]
        if forked:
            started = zygote.start(["-m", "forking", *words], out=out, env=_environment())
        else:
            with out.open("ab") as file:
                started = subprocess.Popen(
                    [sys.executable, "-m", "torchrun", *words],
                    env=_environment(),
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
        try:
            status: int | None = started.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            status = None
            _end(started)
        except BaseException:  # the limit of the test, or Ctrl-C
            _end(started)
            raise
        return Ran(status, _outputs(Path(logs)), out.read_text(errors="replace"))


def _environment() -> dict[str, str]:
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _end(started: zygote.Program | subprocess.Popen[bytes]) -> None:
    """Stop torchrun and every rank; SIGABRT first, so that each prints where it stands."""
    below = _descendants(started.pid)
    for pid in below:
        _signal(os.kill, pid, signal.SIGABRT)
    with suppress(subprocess.TimeoutExpired):
        started.wait(timeout=300)
    for group in {started.pid, *below.values(), *_descendants(started.pid).values()}:
        _signal(os.killpg, group, signal.SIGKILL)
    started.wait()


def _descendants(pid: int) -> dict[int, int]:
    """Processes below `pid`, with their groups: a real torchrun gives each rank one of its own."""
    known = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        known[int(stat.parent.name)] = int(fields[1]), int(fields[2])
    found = [pid]
    for one in found:
        found += [child for child, (parent, _) in known.items() if parent == one]
    return {child: known[child][1] for child in found[1:]}


def _signal(send: Callable[[int, int], None], to: int, number: int) -> None:
    with suppress(ProcessLookupError):
        send(to, number)


def _outputs(logs: Path) -> dict[int, str]:
    """By rank, its standard output and then its errors."""
    found: dict[int, str] = {}
    for name in ("stdout.log", "stderr.log"):
        for path in sorted(logs.rglob(name)):
            rank = re.search(r"/(\d+)/std", str(path))
            if rank:
                number = int(rank[1])
                found[number] = found.get(number, "") + path.read_text(errors="replace")
    return found
