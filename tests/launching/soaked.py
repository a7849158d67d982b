"""A run under `holdfast run` of `trajectory.py`, and what its ranks have told."""

from __future__ import annotations

import getpass
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("trajectory.py")
RANKS = 4


class Soaked:
    """A run under `holdfast run`, and what its ranks have told."""

    def __init__(
        self,
        root: Path,
        *words: object,
        options: tuple[str, ...] = (),
        group: Path | None = None,
    ) -> None:
        """`group`: a control group in which all of it is."""
        self.root = root
        self.memory = Path("/dev/shm") / f"holdfast-test-{secrets.token_hex(4)}"
        self.temporary = root.with_name("temporary")
        self.temporary.mkdir()
        self.killed: set[int] = set()
        self.environment = {
            k: v for k, v in os.environ.items() if k != "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
        } | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONUNBUFFERED": "1",
            "HOLDFAST_MEMORY_DIR": str(self.memory),
            "TMPDIR": str(self.temporary),
        }
        command = [sys.executable, "-m", "holdfast", "run", f"--nproc-per-node={RANKS}"]
        command += ["--max-restarts=1000", *options, str(SCRIPT), str(root), *map(str, words)]
        if group is not None:
            command = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh", *command]
        self.log = root.with_name("log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._read = 0
        self.told: list[dict[str, Any]] = []

    @property
    def printed(self) -> str:
        return self.log.read_text()

    def look(self) -> list[dict[str, Any]]:
        """Return all that was told so far."""
        path = Path(f"{self.root}.told")
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read += len(whole)
            news = list(map(json.loads, whole.splitlines()))
            self.killed.update(t["pid"] for t in news if "ordered" in t)
            self.told += news
        return self.told

    def until(self, is_so: Callable[[], Any], what: str, limit_s: float = 180.0) -> Any:
        stop = time.monotonic() + limit_s
        while not (found := is_so()):
            text = f"{what}: not within {limit_s:g} s"
            assert self.process.poll() is None, f"{what}: it has ended\n{self.printed[-6000:]}"
            assert time.monotonic() < stop, f"{text}\n{self.printed[-6000:]}"
            time.sleep(0.01)
        return found

    @property
    def attempt(self) -> int:
        return max((t["attempt"] for t in self.look() if "begins" in t), default=0)

    def stepping(self, after: int = 0, beyond: int = 0) -> dict[int, int]:
        """Return processes by rank, when all have done a step `beyond` in an attempt `after`."""
        attempt = self.attempt
        steps = {
            t["rank"]: t["pid"]
            for t in self.told
            if t["attempt"] == attempt and t.get("state", 0) > beyond and not t.get("restored")
        }
        return steps if attempt > after and len(steps) == RANKS else {}

    def forked(self) -> list[int]:
        """Return the workers that there are, spares too: grandchildren of the launcher."""
        return [pid for server in children(self.process.pid) for pid in children(server)]

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        self.killed.add(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def finish(self, limit_s: float = 180.0) -> int:
        """Have the run end; return its status."""
        Path(f"{self.root}.stop").touch()
        status = self.process.wait(limit_s)
        self.look()
        return status

    def finishes(self, limit_s: float = 300.0) -> None:
        """Wait until the run has ended, and well."""
        assert self.process.wait(limit_s) == 0, self.printed[-6000:]
        self.look()

    @property
    def last_step(self) -> int:
        return max(t["state"] for t in self.look() if "state" in t)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.memory, ignore_errors=True)

    def processes(self, word: str = "") -> dict[int, str]:
        """Return the processes of this run, agents and writers too, by their environment.

        With a word, those that have it in their command.
        """
        mark, found = f"HOLDFAST_MEMORY_DIR={self.memory}".encode(), {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                    command = (entry / "cmdline").read_text().replace("\0", " ")
                    if word in command:
                        found[int(entry.name)] = command
        return found

    def waits(self, pid: int) -> bool:
        """True if a spare has come to its recoverable function, where it begins threads, and sleeps."""
        with suppress(OSError):
            is_asleep = ") S " in Path(f"/proc/{pid}/stat").read_text()
            return is_asleep and len(os.listdir(f"/proc/{pid}/task")) >= 3
        return False

    def until_gone(self, limit_s: float = 60.0) -> None:
        """Wait until no worker is left; the agent and writers end by themselves."""
        stop = time.monotonic() + limit_s
        while left := self.processes(SCRIPT.name):
            assert time.monotonic() < stop, left
            time.sleep(0.05)

    def nothing_is_left(self) -> None:
        """Neither processes nor memory nor temporary files."""
        stop = time.monotonic() + 60
        while left := self.processes():
            assert time.monotonic() < stop, left
            time.sleep(0.1)
        assert not list(self.memory.glob("jobs/*/*"))
        caches = {f"torchinductor_{getpass.getuser()}"}  # of torch, for other runs too
        assert not {path.name for path in self.temporary.iterdir()} - caches


def children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


@contextmanager
def soaked(root: Path, *words: object, **known: Any) -> Iterator[Soaked]:
    run = Soaked(root, *words, **known)
    try:
        yield run
    finally:
        run.close()


def trajectory(root: Path, steps: int, *words: object) -> dict[tuple[int, int], str]:
    """Return the digest of each rank and step of a run that nothing befalls, under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", str(SCRIPT), str(root), f"--steps={steps}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run(
        [*command, *map(str, words)], env=environment, capture_output=True, text=True, timeout=1200
    )
    assert ran.returncode == 0, ran.stderr
    lines = Path(f"{root}.told").read_text().splitlines()
    return {(t["rank"], t["state"]): t["digest"] for t in map(json.loads, lines) if "state" in t}
