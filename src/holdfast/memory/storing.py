"""Snapshots that go on to storage: agents write the images, and the ranks commit them together.

A rank that comes to its end meanwhile leaves the rest to the agents: they write what they were told to, and
rank 0's commits the step when rank 0 has left, too.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from holdfast.capture import SaveJob
from holdfast.capture.capture import finish, guarded
from holdfast.checkpoint.names import step_prefix
from holdfast.errors import (
    AgentError,
    AgentUnreachable,
    Deadline,
    HoldfastError,
    RankErrors,
    Unavailable,
)
from holdfast.events import span
from holdfast.format.manifest import FileEntry, decode
from holdfast.memory.decision import Decision
from holdfast.memory.node import words as w
from holdfast.threads import Worker
from holdfast.wire import WireError, encode_error, wire_error

if TYPE_CHECKING:
    from holdfast.memory.tier import MemoryTier

LEFT = b"\0"
"""Answer of a rank that has come to its end while its agent writes."""


class Storing:
    """This rank's part in taking snapshots on to storage, in a thread of its own: new snapshots go
    on meanwhile."""

    def __init__(self, tier: MemoryTier) -> None:
        self._tier = tier
        self.thread = Worker("holdfast-storing")
        self.handed_over = threading.Event()
        """Set while no image waits for the agent to be told to write it; one that does must stay
        the newest."""
        self.handed_over.set()
        self.left_to_agents = False
        """On rank 0: True if a step is for its agent to commit, when this process has left."""

    def begin(self, job: SaveJob, file: FileEntry | None, manifest: bytes) -> None:
        """Start to store a snapshot; returns at once.  `file` is this rank's image, None if it has
        none."""
        self.handed_over.clear()
        store = lambda j, _: self._store(j, file, manifest)  # noqa: E731
        self.thread.submit(guarded, store, job, self._tier)

    def _store(self, job: SaveJob, file: FileEntry | None, manifest: bytes) -> None:
        """Have the agent write the image to storage, then commit together."""
        tier = self._tier
        self.handed_over.set()
        try:
            with span("persist", step=job.step, bytes=file.bytes if file else 0):
                if file is not None and job.error is None:
                    tier.client.ask(self._order(job, file))
        except Exception as failed:
            job.error = failed
        said = b"" if job.error is None else encode_error(job.error)
        if tier.client.leaving and isinstance(job.error, AgentUnreachable):
            said = LEFT
        try:
            tier.agree("stored", job, said, lambda j, answers: self._judge(j, answers, manifest))
        except RankErrors:
            if not job.uncertain:
                tier.durable.discard(job.step, tier.attempt(job))
            raise
        except Deadline:
            self.left_to_agents = self.left_to_agents or tier.client.leaving
            raise
        finally:
            if tier.group.rank == 0 and not self.left_to_agents:
                with suppress(HoldfastError):
                    tier.client.ask(w.Settled(tier.job, tier.attempt(job)), timeout_s=10.0)
        finish(job, tier, None)
        tier.durable.tidy(job)

    def _judge(self, job: SaveJob, answers: list[bytes], manifest: bytes) -> Decision:
        """Commit, on rank 0, if every rank's image is in storage."""
        gone = WireError.of(AgentError("it came to its end, the agents go on"))
        left = {r: gone for r, a in enumerate(answers) if a == LEFT}
        errors = {r: wire_error(a) for r, a in enumerate(answers) if a and a != LEFT}
        if left and not errors:
            job.uncertain = self.left_to_agents = True
            errors = left
        elif not errors:
            try:
                self._tier.durable.commit(job, decode(manifest, "snapshot"))
            except Exception as failed:
                errors = {0: WireError.of(failed, "commit")}
                job.uncertain = isinstance(failed, (Unavailable, Deadline))
        return Decision(errors)

    def _order(self, job: SaveJob, file: FileEntry) -> w.Persist:
        tier = self._tier
        claim = tier.durable.claim
        mine = msgspec.json.encode(claim) if tier.group.rank == 0 and claim is not None else b""
        return w.Persist(
            tier.job, tier.attempt(job), tier.group.rank, os.getpid(), tier.durable.store.url,
            step_prefix(job.step) + file.path, tier.deadline_s, mine,
        )  # fmt: skip
