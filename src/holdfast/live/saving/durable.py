"""The durable tier: images to storage, off the training thread.

Digests and writes follow the copier through the image.  Then every rank reports its file or its error, and
rank 0 commits only if all ranks have succeeded and its claim on the root is still the newest.  A failed
save leaves no manifest, its files are deleted, and the next save starts afresh.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from holdfast.base.errors import Deadline, OutOfSpace
from holdfast.base.events import emit, span
from holdfast.base.storage_deadlines import slowest
from holdfast.base.threads import Worker
from holdfast.base.wire import decode_msgpack, rank_errors
from holdfast.core.checkpoint.claiming import Claim
from holdfast.core.checkpoint.names import step_prefix
from holdfast.core.checkpoint.tidying import Keep
from holdfast.core.format.manifest import FileEntry
from holdfast.core.store import Store
from holdfast.live.saving.commit import build_manifest, written
from holdfast.live.saving.handle import Save
from holdfast.live.saving.messages import SaveOutcome, Written
from holdfast.live.saving.operation import Draft, Request, SaveOperation
from holdfast.live.saving.saver import Saver
from holdfast.live.saving.stall_notice import HeldLong
from holdfast.live.saving.steps import RootSteps
from holdfast.live.saving.writing import ImageToFill, write_blocks
from holdfast.live.state.named import Collected
from holdfast.live.state.snapshot import Buffer, PrivateBuffer, touch

if TYPE_CHECKING:
    from holdfast.live.saving.attaching import Attached

STUCK_S = 30.0
"""Seconds after which an unanswered operation of storage, of 8 MiB at most, counts as hanging."""
PROGRESS_S = 0.5


class Durable:
    """Saves to a store.  Every method is collective: all ranks call it in the same order."""

    kind = "save"

    def __init__(
        self,
        store: Store,
        saver: Saver,
        *,
        claim: Claim | None,
        run: int,
        attempt: str | None = None,
        keep: Keep | None = None,
    ) -> None:
        """`attempt`: the folder of the only save; without it each save gets a folder of its own."""
        self.saver = saver
        self.group = saver.group
        self.steps = RootSteps(store, self.group.rank, claim, keep or Keep())
        self.run = run
        self.worker = Worker("holdfast-persist")
        self.news = self.steps.news
        """Warnings for the user."""
        self._attempt = attempt
        self._buffer = PrivateBuffer()
        self._is_free = threading.Event()
        """Set while no save is using the buffer."""
        self._is_free.set()
        self.held = HeldLong(self.news)
        self._was_stuck = False

    @property
    def store(self) -> Store:
        return self.steps.store

    # -- training thread --------------------------------------------------------------------------

    def begin(
        self,
        describe_live: Callable[[], Collected],
        step: int,
        *,
        must: bool,
        yields: bool = False,
        attached: Attached | None = None,
    ) -> Save:
        """Start a save of the live state; return its handle.  `must`: wait for a save in flight instead of
        skipping this one.  `yields`: but skip it if that one waits for storage that does not answer.

        Blocks as `Saver.begin`.
        """
        step_prefix(step)
        busy = self.steps.is_saving and (not must or (yields and self._is_stuck(step)))
        request = Request(step, busy=busy, yields=yields, attached=attached)
        op = self.saver.operation(self, request, on_end=self.steps.let_go)
        self.steps.watch_over(op)
        with self.held.by(op.kind, step):
            return self.saver.begin(op, describe_live)

    def prepare(self, describe_live: Callable[[], Collected]) -> Save:
        """Plan a save, and allocate its memory, in the background.  Returns at once."""
        rehearsal = Request(0, is_rehearsal=True)
        return self.saver.begin(self.saver.operation(self, rehearsal), describe_live)

    def close(self, timeout: float | None = None) -> None:
        """Wait for saves under way, and end the threads.  Deadline after `timeout` seconds (`deadline_s` by
        default)."""
        limit = self.saver.deadline_s if timeout is None else timeout
        try:
            self.settle(limit)
            self._buffer.close()
        finally:
            self.worker.shutdown()
            self.steps.worker.shutdown()

    def settle(self, limit_s: float) -> None:
        """Wait until no save is under way; Deadline after `limit_s`."""
        until = time.monotonic() + limit_s
        try:
            self.saver.settle(limit_s)
            for worker in (self.worker, self.steps.worker):
                worker.settle(max(until - time.monotonic(), 0.1))
        except TimeoutError:
            awaited = self.group.awaited
            raise Deadline(
                f"a save was still under way after {limit_s:.3g} s"
                + (f": {awaited}" * bool(awaited)),
                hint=(
                    slowest() or ("look at the log of that rank" if awaited else "storage may hang")
                )
                + "; the step is committed only if `holdfast ls` shows it",
            ) from None

    def adopt(self, claim: Claim) -> None:
        """Go on as another run, whose saves are newer than all earlier ones."""
        self.steps.claim, self.run = claim, claim.run

    # -- saving thread ----------------------------------------------------------------------------

    def take(self, op: SaveOperation) -> Buffer:
        """Wait for the image's memory: the save before may still be writing it."""
        if not self._is_free.is_set():
            emit("save.queued", step=op.step)
            with self.held.because(op.step, "for the one before"):
                self._await_last(op.request)
        self.steps.make_room(op)
        self._is_free.clear()
        return self._buffer

    def _stuck(self) -> str:
        """Return a text about the root's operation that hangs; empty if none does.  Other homes do not
        count."""
        patience = getattr(self.store, "patience", None)
        return "" if patience is None else slowest(STUCK_S, patience)

    def _is_stuck(self, step: int) -> bool:
        """True if storage has not answered for `STUCK_S`.  Warns once that saves are left out."""
        stuck = self._stuck()
        if stuck and not self._was_stuck:
            self._was_stuck = True
            self.news.append(
                f"the save of step {step} is left out, as are those after it, until the one before has "
                f"ended: {stuck}"
            )
        self._was_stuck &= bool(stuck)
        return bool(stuck)

    def _await_last(self, request: Request) -> None:
        step, until = request.step, time.monotonic() + self.saver.deadline_s
        while not self._is_free.wait(min(PROGRESS_S, max(until - time.monotonic(), 0))):
            if request.yields and (stuck := self._stuck()):
                raise Deadline(f"left out, for the save before waits: {stuck}", step=step)
            if time.monotonic() >= until:
                raise Deadline(f"the save before did not end within {self.saver.deadline_s:g} s")

    # -- persist thread ---------------------------------------------------------------------------

    def keep(self, op: SaveOperation, draft: Draft) -> None:
        """Write this rank's image behind the copier, and commit with the other ranks.  Blocks; RankErrors.

        For a rehearsal: touch the memory, so that the first save does not have to.
        """
        if not op.request.is_rehearsal:
            self.write_and_commit(op, draft)
            return
        if op.error is not None:
            raise op.error
        touch(draft.buffer.view)
        op.release()
        op.end()

    def write_and_commit(self, op: SaveOperation, draft: Draft) -> None:
        """Write this rank's image, perhaps one of another tier, and commit with the other ranks.  Blocks;
        RankErrors."""
        attempt = self.attempt_of(op)
        file = None
        try:
            with span("persist", step=op.step, bytes=draft.image.total_bytes if draft.image else 0):
                self.write_attached(op)
                file = self._write(op, draft, attempt)
        except Exception as failed:
            op.error = failed
        try:
            answer = self.group.ask(
                f"commit/{op.number}",
                written(op, draft, file),
                lambda answers: self._decide(op, draft, attempt, answers),
                self.saver.deadline_s,
                f"written its part of {op.in_words}",
            )
        finally:
            op.release()
        outcome = decode_msgpack(answer, SaveOutcome)
        if outcome.errors:
            self.steps.discard(op, attempt)
            raise rank_errors(f"save of step {op.step}", outcome.errors, op.step) from op.error
        op.end()
        self.steps.tidy(op)

    def write_attached(self, op: SaveOperation) -> None:
        """On rank 0: write the files of the step, before the manifest names them."""
        if op.request.attached is not None:
            op.request.attached.put(self.store, op.step, self.attempt_of(op))

    def attempt_of(self, op: SaveOperation) -> str:
        """Return the name of the folder of an operation's files."""
        return self._attempt or f"{self.run:04d}-{op.number:06d}"

    def _write(self, op: SaveOperation, draft: Draft, attempt: str) -> FileEntry | None:
        """Write the image and return its entry; None if there is nothing to write."""
        if draft.image is None:
            draft.filling.conclude()
            return None
        path, rank = f"{attempt}/r{self.group.rank:05d}.safetensors", self.group.rank
        blocks = ImageToFill(draft.buffer.view, draft.image, draft.filling, self.group.check)
        return write_blocks(self.store, op.step, path, rank, draft.image, blocks)

    def _decide(self, op: SaveOperation, draft: Draft, attempt: str, answers: list[bytes]) -> bytes:
        """Rank 0: commit if every rank has written."""
        given = [decode_msgpack(a, Written) for a in answers]
        errors = {r: w.error for r, w in enumerate(given) if w.error is not None}
        self.steps.was_full = any(e.kind == OutOfSpace.__name__ for e in errors.values())
        if not errors:
            added = op.request.attached
            errors = self.steps.commit(
                op,
                lambda: build_manifest(
                    draft,
                    given,
                    step=op.step,
                    run=self.run,
                    attempt=attempt,
                    attached=added,
                    line=self.steps.line,
                ),
            )
        return msgspec.msgpack.encode(SaveOutcome(errors))

    # -- any thread -------------------------------------------------------------------------------

    def release(self, op: SaveOperation) -> None:
        """Let the memory be filled again."""
        if op.has_memory:
            self._is_free.set()
