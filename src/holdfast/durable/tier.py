"""The durable tier's threads: persist, tidy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from holdfast.capture import Capture, Save, SaveJob, Tier
from holdfast.capture.capture import finish, guarded
from holdfast.capture.together import manifest_of, written
from holdfast.checkpoint.claiming import Claim
from holdfast.checkpoint.committing import commit
from holdfast.checkpoint.names import step_prefix
from holdfast.checkpoint.tidying import Keep, attempt_of, discard, prune, sweep
from holdfast.durable.writing import write_image
from holdfast.errors import Deadline, HoldfastError, Unavailable
from holdfast.events import emit, span
from holdfast.format.image import Image
from holdfast.format.manifest import Manifest
from holdfast.patience import slowest
from holdfast.state.live import Live
from holdfast.state.protocol import SaveOutcome, Written
from holdfast.state.snapshot import Buffer, Filling, Kept, Moment, PrivateBuffer, touch
from holdfast.store import Store
from holdfast.threads import Worker
from holdfast.wire import WireError, rank_errors

LATE_S = 1.0
"""Seconds that a save may wait for the one before; longer slows training, and the user is told once."""


class Durable:
    """Saves to a store.  Every method is collective: all ranks call it in the same order."""

    name = "save"

    def __init__(
        self,
        store: Store,
        capture: Capture,
        *,
        claim: Claim | None,
        run: int,
        attempt: str | None = None,
        keep: Keep | None = None,
    ) -> None:
        self.store = store
        self.capture = capture
        self.group = capture.group
        self.claim = claim
        self.run = run
        self.attempt = attempt
        self.keep = keep or Keep()
        self.deadline_s = capture.deadline_s
        self._lock = threading.Lock()
        self._committing = threading.Lock()
        self._pending: dict[int, int] = {}
        """Steps of the saves that have begun and not ended, on this rank, by number of the job."""
        self._buffer = PrivateBuffer()
        self._free = threading.Event()
        self._free.set()
        self._persist = Worker("holdfast-persist")
        self._tidying = Worker("holdfast-tidy")
        self.news: list[str] = []
        """Messages that the user is to be told."""
        self._was_late = False
        self.also_tidy: Callable[[], None] = lambda: None
        """Called on rank 0, after the steps have been tidied up."""

    # -- training thread --------------------------------------------------------------------------

    def begin(self, describe_live: Callable[[], Live], step: int, *, must: bool) -> Save:
        """Start a save of the live state.  `must`: wait for the one in flight, do not skip.

        Blocks as `Capture.begin`.
        """
        step_prefix(step)
        busy = not must and self.busy
        self.watch_over(step)
        return self.capture.begin(describe_live, step, self, busy=busy)

    @property
    def busy(self) -> bool:
        """True if a save is under way on this rank."""
        return bool(self._pending)

    def prepare(self, describe_live: Callable[[], Live]) -> None:
        """Plan a save and have the memory for it ready.  Returns at once."""
        self.capture.prepare(describe_live, self)

    def close(self, timeout: float | None = None) -> None:
        """Wait for what is under way, for `deadline_s` unless told otherwise; Deadline after that."""
        limit = self.deadline_s if timeout is None else timeout
        try:
            self.settle(limit)
            self._buffer.close()
        finally:
            self._persist.shutdown()
            self._tidying.shutdown()

    def settle(self, limit_s: float) -> None:
        """Wait until nothing is under way; Deadline if that takes longer."""
        until = time.monotonic() + limit_s
        try:
            self.capture.settle(limit_s)
            for pool in (self._persist, self._tidying):
                pool.settle(max(until - time.monotonic(), 0.1))
        except TimeoutError:
            awaited = self.capture.group.awaited
            raise Deadline(
                f"a save was still under way after {limit_s:.3g} s"
                + (f": {awaited}" * bool(awaited)),
                hint=(
                    slowest() or ("look at the log of that rank" if awaited else "storage may hang")
                )
                + "; the step is committed only if `holdfast ls` shows it",
            ) from None

    def adopt(self, claim: Claim) -> None:
        """Go on as another run: what is saved from now on is newer than all that was."""
        self.claim, self.run = claim, claim.run

    def watch_over(self, step: int) -> None:
        """The next job is a save of `step`: nothing of it may be tidied away."""
        with self._lock:
            self._pending[self.capture.next_number] = step

    def let_go(self, job: SaveJob) -> None:
        """Say that the job is over: its step is no longer kept from being tidied away."""
        with self._lock:
            self._pending.pop(job.number, None)

    # -- capture thread ---------------------------------------------------------------------------

    def take(self, job: SaveJob) -> Buffer:
        """Wait for the image's memory: the save before may still be writing it."""
        if not self._free.is_set():
            emit("save.queued", step=job.step)
            self._await_last(job.step)
        self._free.clear()
        return self._buffer

    def _await_last(self, step: int) -> None:
        began = time.monotonic()
        if not self._free.wait(self.deadline_s):
            raise Deadline(f"the save before did not end within {self.deadline_s:g} s")
        late_s = time.monotonic() - began
        if late_s > LATE_S and not self._was_late:
            self._was_late = True
            self.news.append(
                f"the save of step {step} waited {late_s:.1f} s for the one before, and training with it: "
                'save less often, or leave such saves out with when_busy="skip"; this is told once'
            )

    def follows(self, job: SaveJob) -> bool:
        return False

    def moment(self, job: SaveJob) -> Moment:
        return job.moment

    def release(self, job: SaveJob) -> None:
        """The memory may be filled again."""
        if job.buffer is not None:
            job.buffer = None
            self._free.set()

    def ended(self, job: SaveJob, error: BaseException | None) -> None:
        """The job is over."""
        self.let_go(job)

    def warm(self, job: SaveJob) -> None:
        """Make memory for the image real, so that the first save does not have to."""

        def work(job: SaveJob, _: object) -> None:
            if job.error is not None:
                raise job.error
            assert job.buffer is not None
            touch(job.buffer.view)
            self.release(job)

        self._persist.submit(guarded, work, job, self)

    def beside(self, job: SaveJob, image: Image, aside: Kept) -> None:
        """Nothing else is to be read."""

    def write(self, job: SaveJob, image: Image | None, filling: Filling) -> None:
        """Write behind the copier, then commit together."""
        self._persist.submit(
            guarded, lambda job, _: self.write_and_commit(job, image, filling, self), job, self
        )

    # -- persist thread ---------------------------------------------------------------------------

    def write_and_commit(
        self, job: SaveJob, image: Image | None, filling: Filling, tier: Tier
    ) -> None:
        """Write this rank's image, which is `tier`'s, and commit with the others.  Blocks; RankErrors."""
        assert job.verdict is not None and job.plan is not None
        file = None
        attempt = self.attempt or f"{self.run:04d}-{job.number:06d}"
        try:
            with span("persist", step=job.step, bytes=image.total_bytes if image else 0):
                if image is not None and (image.pieces.total_bytes or image.extras_bytes):
                    path = f"{attempt}/r{self.group.rank:05d}.safetensors"
                    assert job.buffer is not None
                    memory, rank = job.buffer.view, self.group.rank
                    file = write_image(self.store, job.step, path, rank, memory, image, filling)
                else:  # this rank has nothing
                    filling.conclude()
        except Exception as failed:
            job.error = failed
        try:
            answer = self.group.ask(
                f"commit/{job.number}",
                written(job, file, self.group.rank),
                lambda answers: self._decide(job, attempt, answers),
                self.deadline_s,
                f"written its part of {job.in_words}",
            )
        finally:
            tier.release(job)
        outcome = msgspec.msgpack.decode(answer, type=SaveOutcome)
        if outcome.errors:
            if not job.uncertain:
                self.discard(job.step, attempt)
            raise rank_errors(f"save of step {job.step}", outcome.errors, job.step) from job.error
        finish(job, tier, None)
        self.tidy(job)

    def _decide(self, job: SaveJob, attempt: str, answers: list[bytes]) -> bytes:
        """Rank 0: commit if every rank has written."""
        given = [msgspec.msgpack.decode(a, type=Written) for a in answers]
        errors = {r: w.error for r, w in enumerate(given) if w.error is not None}
        if not errors:
            try:
                manifest = manifest_of(job, self.run, attempt, given)
                self.commit(job, manifest)
            except Exception as error:
                errors = {0: WireError.of(error, "commit")}
                job.uncertain = isinstance(error, (Unavailable, Deadline))
        return msgspec.msgpack.encode(SaveOutcome(errors))

    def commit(self, job: SaveJob, manifest: Manifest) -> None:
        """Rank 0: make a step exist, all the files of which are written."""
        with self._committing:
            job.replaced = attempt_of(self.store, job.step)
            commit(self.store, manifest, self.claim)

    def discard(self, step: int, attempt: str) -> None:
        """Delete an attempt's files, if possible; the rest is swept after the next successful
        save."""
        try:
            if self.group.rank == 0:
                discard(self.store, step, attempt)
        except HoldfastError as error:
            emit("discard.failed", step=step, error=str(error))

    def tidy(self, job: SaveJob) -> None:
        """On rank 0: tidy up after a commit, in the background."""
        if self.group.rank == 0:
            self._tidying.submit(self._tidy, job)

    def _tidy(self, job: SaveJob) -> None:
        """After a commit, delete what it replaced, what `keep` lets go, what crashes left."""
        try:
            with span("tidy", step=job.step):
                if job.replaced is not None:
                    discard(self.store, job.step, job.replaced)
                with self._lock:  # they may end in another order than they began
                    pending = dict(self._pending)
                spare = tuple(pending.values())
                prune(self.store, self.keep, spare=spare, lock=self._committing)
                if self.claim is not None:
                    sweep(self.store, self.claim, min([job.number, *(n - 1 for n in pending)]))
                self.also_tidy()
        except Exception as error:
            emit("tidy.failed", error=str(error))
