"""Stamps: what the ranks of a job that is killed write down, and what the driver reads out of it.

Every rank appends lines to one file, each with its rank, its process, the attempt and the time.  A *step is
done* when every rank of an attempt has stamped it.  A failure is measured from the SIGKILL:

    kill       resumed                    caught up
     |            |                           |
     |  restart   |  steps done once more ... |  the step after the last one done before the kill
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = dict[str, Any]
PARTS = {
    "raised": "noticed by the others",
    "left": "they have left the function",
    "born": "the first new process begins",
    "imports": "new processes have imported",
    "entered": "the function entered again",
    "group": "process group",
    "model": "model and optimizer",
    "checkpointer": "Checkpointer made",
    "restored": "restored",
    "step": "first step",
}
"""Moments between a kill and the first step, in order; a contestant has those that it has."""


def born() -> float:
    """When this process began, as `time.time` counts."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


class Stamps:
    """A rank's side."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.about: Record = {}
        self._imported = 0.0

    def __call__(self, event: str, **about: Any) -> None:
        record = {"event": event, "time": time.time(), "pid": os.getpid(), **self.about, **about}
        os.write(self._fd, (json.dumps(record) + "\n").encode())

    def ready(self) -> None:
        """Everything is imported; a spare waits from now on."""
        self._imported = time.time()
        self("ready")

    def begin(self, **about: Any) -> None:
        """A function is entered, with a rank; tells of the process too, the first time."""
        is_new = not self.about
        self.about = {
            "rank": int(os.environ["RANK"]),
            "world": int(os.environ["WORLD_SIZE"]),
            "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            **about,
        }
        if is_new:
            self("born", time=born())
            self("imports", time=self._imported)
        self("entered")


@dataclass(frozen=True)
class Done:
    """A step that all ranks of an attempt have done."""

    attempt: int
    step: int
    world: int
    time: float


@dataclass
class Log:
    """The driver's side: reads on when asked to."""

    path: Path
    records: list[Record] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._at = 0
        self._rest = b""
        self._steps: dict[tuple[int, int], list[float]] = {}

    def read(self) -> None:
        if not self.path.exists() or self.path.stat().st_size == self._at:
            return
        with self.path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._add(json.loads(line))

    def _add(self, record: Record) -> None:
        self.records.append(record)
        if record["event"] != "step":
            return
        key = (record["attempt"], record["step"])
        times = self._steps.setdefault(key, [])
        times.append(record["time"])
        if len(times) == record["world"]:
            self.done.append(Done(*key, record["world"], max(times)))

    @property
    def last(self) -> int:
        """The furthest step done."""
        return max((d.step for d in self.done), default=0)

    @property
    def attempt(self) -> int:
        return max((r.get("attempt", 0) for r in self.records), default=0)

    def pid(self, rank: int) -> int:
        """The process that has a rank now."""
        entered = (r for r in reversed(self.records) if r["event"] == "entered")
        return next(r["pid"] for r in entered if r["rank"] == rank)

    def waiting(self) -> list[int]:
        """Processes that are ready, and have no rank yet."""
        entered = {r["pid"] for r in self.records if r["event"] == "entered"}
        return [r["pid"] for r in self.records if r["event"] == "ready" and r["pid"] not in entered]

    def digests(self) -> dict[int, list[str]]:
        """By step, the digests of all ranks, in their order."""
        found: dict[int, dict[int, str]] = {}
        for r in self.records:
            if r["event"] == "digest":
                found.setdefault(r["step"], {})[r["rank"]] = r["digest"]
        return {step: [of[rank] for rank in sorted(of)] for step, of in found.items()}

    def of(self, event: str, attempt: int) -> list[Record]:
        return [r for r in self.records if r["event"] == event and r.get("attempt") == attempt]

    def step_s(self) -> float:
        """The median time of a step that follows another one of its attempt."""
        gaps = sorted(
            b.time - a.time
            for a, b in zip(self.done, self.done[1:])
            if a.attempt == b.attempt and a.step + 1 == b.step
        )
        return gaps[len(gaps) // 2] if gaps else 0.0


@dataclass
class Failure:
    """A rank that was killed."""

    at: float
    rank: int
    pid: int
    attempt: int
    last: int
    """The last step that was done before."""

    def resumed(self, log: Log) -> Done | None:
        """The first step done in a later attempt."""
        return next((d for d in log.done if d.attempt > self.attempt), None)

    def caught_up(self, log: Log) -> Done | None:
        """The step that follows the last one done before, in a later attempt."""
        later = (d for d in log.done if d.attempt > self.attempt)
        return next((d for d in later if d.step > self.last), None)

    def whole(self, log: Log, ranks: int) -> Done | None:
        """The first such step with all ranks again."""
        later = (d for d in log.done if d.attempt > self.attempt)
        return next((d for d in later if d.step > self.last and d.world >= ranks), None)

    def found(self, log: Log, ranks: int) -> Record:
        """What there is to report; when it has caught up."""
        resumed, caught_up, whole = self.resumed(log), self.caught_up(log), self.whole(log, ranks)
        assert resumed is not None and caught_up is not None
        restored = [r["step"] for r in log.of("restored", resumed.attempt)]
        return {
            "at": self.at,
            "rank": self.rank,
            "last": self.last,
            "restored": min(restored, default=self.last),
            "lost": max(0, self.last - min(restored, default=self.last)),
            "attempts": resumed.attempt - self.attempt,
            "resumed_s": resumed.time - self.at,
            "caught_up_s": caught_up.time - self.at,
            "whole_s": whole.time - self.at if whole else None,
            "parts": self.parts(log, resumed),
        }

    def parts(self, log: Log, resumed: Done) -> dict[str, float]:
        """Seconds from moment to moment, each at the slowest rank."""
        times = {}
        for event in PARTS:
            attempt = self.attempt if event in ("raised", "left") else resumed.attempt
            times[event] = [r["time"] for r in log.of(event, attempt)]
        times["step"] = [resumed.time]
        parts, before = {}, self.at
        for event, at in times.items():
            later = [t for t in at if t > self.at]
            if later:
                moment = max(before, min(later) if event == "born" else max(later))
                parts[event], before = moment - before, moment
        return parts
