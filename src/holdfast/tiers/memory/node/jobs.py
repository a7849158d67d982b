"""The state of an agent: jobs, and the memory of each.

A job's memory is a set of *slots*.  A slot is `filling` for one training process, or `ready` with one
attempt's image of one rank, or `empty`.  The newest commit's slots are not given out again while the job
may need them, all others are; until one is, what it holds may still serve.  So two slots per rank are all
that ever are needed, and nothing has to be said when a snapshot grows old.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.messages import Slot


@dataclass(frozen=True)
class PersistTask:
    """An image on its way to storage, which must not be given out."""

    order: w.Persist
    ask: int
    written: bool = False


@dataclass(frozen=True)
class Job:
    """A training run on this node, over all its restarts."""

    name: str
    root: str = ""
    run: int = 0
    slots: dict[str, Slot] = field(default_factory=dict)
    commits: tuple[tuple[str, int], ...] = ()
    """(attempt, step), the newest last: those of which an image may still be here."""
    trainers: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Rank and start time of each training process, by pid."""
    writing: dict[tuple[str, int], PersistTask] = field(default_factory=dict)
    """Images on their way to storage, by attempt and rank."""
    crashed: bool = False
    finished: bool = False
    """True if rank 0 has left, with its work done."""
    claim: bytes = b""
    flush_s: float = 0.0
    bytes_per_s: int = 0
    """Cap for each rank, on what protects and stores its images; 0: none."""
    host: str = ""
    """This node's address for other nodes, as the run gave it; empty: the agent's own."""
    budget: int = 0
    """Most bytes of memory for this job alone, as the run gave it; 0: the agent's budget."""
    elsewhere: tuple[str, ...] = ()
    """Attempts of which only the manifest is here; the next commit takes their place."""
    flushed: str = ""
    """The attempt that was sent to storage because everybody had died."""
    number: int = 0
    """Number of the next file."""
    seen: float = 0.0

    @property
    def newest(self) -> str:
        return self.commits[-1][0] if self.commits else ""

    @property
    def used(self) -> int:
        return sum(s.capacity for s in self.slots.values())

    @property
    def ready(self) -> set[str]:
        """Attempts of which an image is here."""
        return {s.attempt for s in self.slots.values() if s.phase == "ready"}

    @property
    def unwritten(self) -> set[int]:
        """Steps of which an image is on its way to storage."""
        attempts = {attempt for (attempt, _), one in self.writing.items() if not one.written}
        return {s.step for s in self.slots.values() if s.attempt in attempts}

    @property
    def holds_memory(self) -> bool:
        """False if all that is left of the job is a commit that waits for files of other nodes."""
        return bool(self.slots) or not self.writing

    def images(self, attempt: str) -> list[Slot]:
        """The ranks' images of an attempt that are here."""
        wanted = ("share", attempt, "ready")
        return [s for s in self.slots.values() if (s.kind, s.attempt, s.phase) == wanted]

    def is_free(self, slot: Slot) -> bool:
        """True if a slot may be given out."""
        if any(attempt == slot.attempt for attempt, _ in self.writing):
            return False
        return slot.phase == "empty" or (slot.phase == "ready" and slot.attempt != self.newest)

    def is_spare(self, slot: Slot) -> bool:
        """True if another job may have a slot, when no process of this one is left.

        It may have an empty slot, one with an older commit, and any ready one if all processes ended
        well; but none that is on its way to storage.
        """
        if slot.phase != "ready" or any(attempt == slot.attempt for attempt, _ in self.writing):
            return slot.phase == "empty"
        older = {attempt for attempt, _ in self.commits[:-1]}  # others may know of a newer commit
        return not self.crashed or slot.attempt in older

    def trainers_but(self, pids: set[int]) -> dict[int, tuple[int, str]]:
        return {pid: who for pid, who in self.trainers.items() if pid not in pids}

    def with_slots(self, *changed: Slot) -> Job:
        return replace(self, slots={**self.slots, **{s.name: s for s in changed}})

    def without(self, names: Collection[str]) -> Job:
        """Return the job without the slots of these names."""
        return replace(self, slots={n: s for n, s in self.slots.items() if n not in names})


@dataclass(frozen=True)
class State:
    """Everything that an agent knows."""

    budget: int
    """Most bytes of memory for all jobs: as given by hand; else the node's default, or the largest budget
    of a job."""
    stay: bool = False
    """True if it was started by hand, or told to stay: it does not leave by itself."""
    jobs: dict[str, Job] = field(default_factory=dict)
    idle_since: float = 0.0

    @property
    def used(self) -> int:
        return sum(job.used for job in self.jobs.values())

    @property
    def is_filling(self) -> bool:
        """True while a process makes a snapshot."""
        slots = (slot for job in self.jobs.values() for slot in job.slots.values())
        return any(s.owner and s.phase in ("making", "filling") for s in slots)

    def with_job(self, job: Job, **changes: Any) -> State:
        job = replace(job, **changes)
        return replace(self, jobs={**self.jobs, job.name: job})
