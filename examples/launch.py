"""Start train.py on a layout, follow it while it runs, and strike it down: in mid-save, or at any moment.

Every wait has a deadline, a failure shows the tail of what the processes printed, and no process
outlives its `with`:

    with Run(phase, Path("demo-out"), horizon=100, every=10) as run:
        while run.alive():
            for record in run.new_records(): ...
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

Record = dict[str, Any]
TRAIN = Path(__file__).with_name("train.py")


class Failed(Exception):
    """A run that ended badly, or did not say anything for too long."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One launch: which root it continues, on which layout, up to which step. `name` names its files.

    `records`: every step is recorded, and full checkpoints are none but those that records need.
    `in_place`: under `holdfast run`, with a spare process; else under torchrun.
    """

    name: str
    root: Path
    dp: int
    tp: int
    until: int
    records: bool = False
    in_place: bool = False

    @property
    def layout(self) -> str:
        parts = [f"FSDP x{self.dp}"] * (self.dp > 1) + [f"TP x{self.tp}"] * (self.tp > 1)
        return " ".join(parts) or "none"


def command(phase: Phase) -> list[str]:
    """How the script is started: plain Python for one process, a launcher for several."""
    num_processes = phase.dp * phase.tp
    if num_processes == 1:
        return [sys.executable, str(TRAIN)]
    launcher = ["torch.distributed.run", "--max-restarts=3"]
    if phase.in_place:
        launcher = ["holdfast", "run", "--spares=1"]
    ranks = ["--standalone", f"--nproc-per-node={num_processes}"]
    return [sys.executable, "-m", *launcher, *ranks, str(TRAIN), f"--tp={phase.tp}"]


def environment() -> dict[str, str]:
    """One thread per process, no CUDA, and restarts that work (torch 2.13 with gloo needs the last one)."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


class Run:
    """The processes of one phase: losses are followed in `<name>.jsonl`, output is kept in `<name>.out`."""

    def __init__(
        self, phase: Phase, out: Path, *, horizon: int, every: int, silence_s: float = 120
    ) -> None:
        self.phase, self.silence_s = phase, silence_s
        stem = out / phase.name.replace(" ", "-")
        self.log, self.output, self.witness = (
            stem.with_suffix(end) for end in (".jsonl", ".out", ".witness.jsonl")
        )
        options = {"root": phase.root, "steps": phase.until, "horizon": horizon, "every": every}
        options |= {"keep": horizon, "log-file": self.log, "witness": self.witness}
        self.command = command(phase) + [f"--{name}={value}" for name, value in options.items()]
        self.command += ["--records"] * phase.records
        self.records: list[Record] = []

    def __enter__(self) -> "Run":
        self.log.touch()
        self.follower = self.log.open()
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                self.command,
                env=environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.heard = time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End what still runs; the launcher first, since its workers have sessions of their own."""
        self.follower.close()
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(40)  # torchrun itself allows its workers 30 s
            for pid in {self.process.pid, *self.pids()}:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            self.process.wait(10)

    def alive(self) -> bool:
        """False once the run has ended well; Failed if it ended badly or has been silent for too long."""
        code = self.process.poll()
        if code is None and time.monotonic() - self.heard > self.silence_s:
            raise self.failed(f"nothing heard for {self.silence_s:.0f} s")
        if code:
            raise self.failed(f"exit status {code}")
        return code is None

    def new_records(self) -> list[Record]:
        """What train.py has logged since the last call; a line that is not yet whole waits for the next."""
        new = []
        while (at := self.follower.tell(), line := self.follower.readline())[1].endswith("\n"):
            new.append(json.loads(line))
        self.follower.seek(at)
        if new:
            self.heard = time.monotonic()
            self.records += new
        return new

    def starts(self) -> list[Record]:
        """One record per (re)start of the ranks."""
        return [record for record in self.records if record["event"] == "start"]

    def pids(self) -> list[int]:
        """Process ids by rank, as of the newest start."""
        return self.starts()[-1]["pids"] if self.starts() else []

    def stretches(self) -> list[list[tuple[int, float]]]:
        """(step, loss) as logged, one list per start; steps that were done again appear again."""
        stretches: list[list[tuple[int, float]]] = []
        for record in self.records:
            if record["event"] == "start":
                stretches.append([])
            else:
                stretches[-1].append((record["step"], record["loss"]))
        return stretches

    def losses(self) -> list[tuple[int, float]]:
        """All stretches as one."""
        return [point for stretch in self.stretches() for point in stretch]

    def lost(self) -> int | None:
        """Steps that were done before the first restart and again after it; None without a restart."""
        if len(self.starts()) < 2 or not self.stretches()[0]:
            return None
        done, _ = self.stretches()[0][-1]
        return max(0, done - self.starts()[1]["restored_from"])

    def until_next_step_s(self, killed: float) -> float:
        """Seconds from a kill to the end of the first step after it, in which all ranks take part."""
        start = self.records.index(self.starts()[1])
        step = next(record for record in self.records[start:] if record["event"] == "step")
        return float(step["time"] - killed)

    def witnessed(self, event: str) -> Record:
        """Digests of the state as torch itself gathered it: at the first "restored", or "end"."""
        records = map(json.loads, self.witness.read_text().splitlines())
        return next(record for record in records if record["event"] == event)

    def failed(self, what: str, num_lines: int = 40) -> Failed:
        """An error that shows the output from a rank's last traceback on: torchrun's tells nothing."""
        lines = self.output.read_text(errors="replace").splitlines()
        starts = [n for n, line in enumerate(lines) if re.match(r"\[rank\d+\]: Traceback", line)]
        shown = lines[starts[-1] :][:num_lines] if starts else lines[-num_lines:]
        return Failed("\n".join([f"{self.phase.name}: {what}; from {self.output}:", *shown]))


def half_saved(root: Path) -> tuple[int, list[int]] | None:
    """A step being written, with no manifest yet, and the ranks whose images are already in place."""
    for step in sorted(root.glob("steps/*"), reverse=True):
        with suppress(OSError):  # a directory may come and go while it is looked at
            if any(step.iterdir()) and not (step / "manifest.json").exists():
                images = step.glob("*/r?????.safetensors")
                return int(step.name), [int(image.name[1:6]) for image in images]
    return None


@dataclass(slots=True)
class Assassin:
    """Kills one rank, once, as soon as a save is seen half done at a step after `patience`.

    It prefers a rank that has not finished its part; when all have, rank 0, which would commit the step.
    """

    root: Path
    patience: int
    step: int | None = None
    rank: int | None = None

    def look(self, run: Run) -> bool:
        """Whether it struck just now. Cheap enough to be called every millisecond."""
        pids = run.pids()
        seen = half_saved(self.root) if pids and self.step is None else None
        if seen is None or seen[0] < self.patience:
            return False
        self.step, done = seen
        self.rank = max(set(range(len(pids))) - set(done), default=0)
        os.kill(pids[self.rank], signal.SIGKILL)
        return True


@dataclass(slots=True)
class Chance:
    """Kills one rank, once, within a second after step `after`; when, and which, is left to chance."""

    after: int
    step: int | None = None
    rank: int | None = None
    due: float | None = None
    killed: float = 0.0
    """The time of day."""

    def look(self, run: Run) -> bool:
        """Whether it struck just now."""
        step = run.losses()[-1][0] if run.losses() else 0
        if self.step is not None or step < self.after:
            return False
        if self.due is None:
            self.due = time.monotonic() + random.random()
        if time.monotonic() < self.due:
            return False
        self.step, self.rank = step, random.randrange(len(run.pids()))
        self.killed = time.time()
        os.kill(run.pids()[self.rank], signal.SIGKILL)
        return True
