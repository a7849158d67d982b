"""What dead agents and dead jobs leave in memory, and how it is freed without an agent."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.base.errors import UsageError
from holdfast.base.host import process_state
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node import state_machine
from holdfast.tiers.memory.node.effects import Refuse, RemoveJob
from holdfast.tiers.memory.node.jobs import Job
from holdfast.tiers.memory.node.segment import Segments

LOCK = "agent.lock"


@contextmanager
def held_alone(root: Path) -> Iterator[bool]:
    """Hold the lock of the directory's agent during the block; gives False if a process has it already."""
    with open(os.open(root / LOCK, os.O_WRONLY | os.O_CREAT, 0o600), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def dead_trainers(job: Job) -> tuple[int, ...]:
    """Return the training processes of a job that have died since they were noted."""
    return tuple(p for p, (_, since) in job.trainers.items() if process_state(p, since) == "gone")


def free_remains(root: Path, job: str) -> list[str]:
    """Free what dead jobs left, or `job` alone if it is not empty, on a node without an agent; return their
    names.  UsageError if that job runs or is unknown; UnsupportedVersion.  Blocks."""
    with held_alone(root) as is_mine:
        if not is_mine:
            text = f"an agent begins at {root} at this moment"
            raise UsageError(text, hint="the same command again")
        segments = Segments(root)
        state = state_machine.adopted(0, segments.find(), 0.0)
        for found in state.jobs.values():
            state, _ = state_machine.step(state, w.Gone(found.name, dead_trainers(found)), 0.0)
        _, effects = state_machine.step(state, w.Clean(job), 0.0)
        freed = []
        for effect in effects:
            if isinstance(effect, Refuse):
                raise effect.error.error()
            if isinstance(effect, RemoveJob):
                segments.remove_job(effect.job)
                freed.append(effect.job)
        segments.delete_removed()
        return freed
