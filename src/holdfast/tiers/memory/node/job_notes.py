"""What an agent notes of a job for the next agent, besides the slots: `job.json` and `peers.json`.

Every rank of this node reports it; a file is written only if its content has changed.
"""

from __future__ import annotations

import logging

from holdfast.tiers.memory.node.jobs import Job
from holdfast.tiers.memory.node.messages import Card
from holdfast.tiers.memory.node.segment import JobNote, Segments, job_note

log = logging.getLogger("holdfast.agent")


class JobNotes:
    """The notes on all jobs, and what was written of them last."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._noted: dict[str, JobNote] = {}
        self._peers: dict[str, tuple[Card, ...]] = {}

    def note(self, job: Job) -> None:
        """Write `job.json` if it has changed; if there is no room, the next call tries again."""
        note, path = job_note(job), self._segments.path(job.name, "job.json")
        if self._noted.get(job.name) == note and path.exists():
            return
        try:
            self._segments.note_job(job.name, note)
            self._noted[job.name] = note
        except OSError as error:
            log.error("%s: %s", path, error.strerror or error)

    def keep_peers(self, job: str, cards: tuple[Card, ...]) -> None:
        """Write the peers' cards, if they have changed."""
        if self._peers.get(job) != cards:
            self._segments.keep_peers(job, cards)
            self._peers[job] = cards

    def forget(self, job: str) -> None:
        """Forget what was written of a job, whose files are removed."""
        self._noted.pop(job, None)
        self._peers.pop(job, None)
