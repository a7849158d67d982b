"""Snapshots that go on to storage: agents write the images, and the ranks commit them together.

A rank that comes to its end meanwhile leaves the rest to the agents: they finish writing, and rank 0's
agent commits the step when rank 0 has left, too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec

from holdfast.base.errors import (
    AgentError,
    AgentUnreachable,
    Deadline,
    RankErrors,
)
from holdfast.base.events import span
from holdfast.base.threads import Worker
from holdfast.base.wire import WireError, encode_error, wire_error
from holdfast.core.checkpoint.names import step_prefix
from holdfast.core.format.manifest import FileEntry, decode_manifest
from holdfast.live.saving import SaveOperation
from holdfast.live.saving.durable import STUCK_S
from holdfast.tiers.memory.decision import Decision
from holdfast.tiers.memory.node import messages as w

if TYPE_CHECKING:
    from holdfast.tiers.memory.tier import MemoryTier

LEFT = b"\0"
"""Answer of a rank that has come to its end while its agent writes."""


class Storing:
    """This rank's part in storing snapshots, in a thread of its own: new snapshots go on meanwhile."""

    def __init__(self, tier: MemoryTier) -> None:
        self._tier = tier
        self.worker = Worker("holdfast-storing")
        self.handed_over = threading.Event()
        """Cleared while an image waits until the agent is told to write it: till then its snapshot must
        stay the newest."""
        self.handed_over.set()
        self._newest = 0
        """Number of the newest operation that stores a snapshot."""
        self.left_to_agents = False
        """On rank 0: True if its agent is to commit a step, once this process has left."""

    def begin(self, op: SaveOperation, file: FileEntry | None, manifest: bytes) -> None:
        """Start to store a snapshot; returns at once.  `file` is this rank's image, None if it has
        none."""
        self.handed_over.clear()
        self._newest = op.number
        self.worker.submit(op.guarded, self._store, op, file, manifest)

    def _store(self, op: SaveOperation, file: FileEntry | None, manifest: bytes) -> None:
        """Have the agent write the image to storage, then commit together."""
        tier, client = self._tier, self._tier.agent.client
        try:
            with span("persist", step=op.step, bytes=file.bytes if file else 0):
                with self._handed_over_at_the_end(op):
                    tier.durable.write_attached(op)  # before any agent could commit late
                if file is not None and op.error is None:
                    client.ask(self._order(op, file))
        except Exception as failed:
            op.error = failed
        said = b"" if op.error is None else encode_error(op.error)
        if client.leaving and isinstance(op.error, AgentUnreachable):
            said = LEFT
        try:
            tier.agree("stored", op, said, lambda answers: self._judge(op, answers, manifest))
        except RankErrors:
            tier.durable.steps.discard(op, tier.attempt(op))
            raise
        except Deadline:
            self.left_to_agents = self.left_to_agents or client.leaving
            raise
        finally:
            if tier.saver.group.rank == 0 and not self.left_to_agents:
                tier.agent.settle(tier.attempt(op))
        op.end()
        tier.durable.steps.tidy(op)

    @contextmanager
    def _handed_over_at_the_end(self, op: SaveOperation) -> Iterator[None]:
        """Let new snapshots wait until the block ends.  If storage does not answer for `STUCK_S`, they wait
        no longer: they may take the image's place, and then the save fails."""

        def set_it() -> None:
            if self._newest == op.number:  # else another image waits by now
                self.handed_over.set()

        late = threading.Timer(STUCK_S, set_it)
        late.daemon = True
        try:
            if op.request.attached is not None:
                with suppress(RuntimeError):  # the host has no more threads
                    late.start()
            yield
        finally:
            late.cancel()
            set_it()

    def _judge(self, op: SaveOperation, answers: list[bytes], manifest: bytes) -> Decision:
        """Commit, on rank 0, if every rank's image is in storage."""
        gone = WireError.of(AgentError("the process came to its end; the agents finish the save"))
        left = {r: gone for r, a in enumerate(answers) if a == LEFT}
        errors = {r: wire_error(a) for r, a in enumerate(answers) if a and a != LEFT}
        if left and not errors:
            op.outcome.is_uncertain = self.left_to_agents = True
            errors = left
        elif not errors:
            errors = self._tier.durable.steps.commit(
                op, lambda: decode_manifest(manifest, "snapshot")
            )
        return Decision(errors)

    def _order(self, op: SaveOperation, file: FileEntry) -> w.Persist:
        tier, steps = self._tier, self._tier.durable.steps
        is_first = tier.saver.group.rank == 0 and steps.claim is not None
        mine = msgspec.json.encode(steps.claim) if is_first else b""
        return w.Persist(
            tier.agent.job, tier.attempt(op), tier.saver.group.rank, os.getpid(), steps.store.url,
            step_prefix(op.step) + file.path, tier.saver.deadline_s, mine,
        )  # fmt: skip
