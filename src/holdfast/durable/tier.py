"""The durable tier's threads: capture, persist, tidy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Literal

import msgspec
import torch

from holdfast.checkpoint.claiming import Claim
from holdfast.checkpoint.committing import commit
from holdfast.checkpoint.names import step_prefix
from holdfast.checkpoint.tidying import Keep, attempt_of, discard, prune, sweep
from holdfast.codec.digest import ALGORITHM, CHUNK_BYTES
from holdfast.durable.job import Job, Save, text_of
from holdfast.durable.planning import Planner
from holdfast.durable.writing import write_image
from holdfast.errors import Deadline, HoldfastError, RankErrors, Unavailable
from holdfast.events import emit, span
from holdfast.format.image import Image
from holdfast.format.manifest import VERSION, Manifest
from holdfast.group import Group
from holdfast.layout import Mesh
from holdfast.state.agreed import describe
from holdfast.state.live import Live
from holdfast.state.protocol import Outcome, Written, merge_extras
from holdfast.state.replicas import check_replicas, replica_digests
from holdfast.state.snapshot import (
    MAX_RETAKES,
    Filling,
    Gate,
    Kept,
    Memory,
    Moment,
    Window,
    copy_steadily,
    set_aside,
    touch,
)
from holdfast.store import Store
from holdfast.version import __version__


class Durable:
    """Saves to a store.  Every method is collective: all ranks call it in the same order."""

    def __init__(
        self,
        store: Store,
        group: Group,
        *,
        claim: Claim | None,
        run: int,
        attempt: str | None = None,
        keep: Keep | None = None,
        mesh: Mesh | None = None,
        deadline_s: float = 600.0,
        replicas: Literal["trust", "verify"] = "trust",
    ) -> None:
        self.store = store
        self.replicas = replicas
        self.group = group
        self.claim = claim
        self.run = run
        self.attempt = attempt
        self.keep = keep or Keep()
        self.deadline_s = deadline_s
        self._number = 0
        self._gate = Gate()
        self._lock = threading.Lock()
        self._committing = threading.Lock()
        self._pending: list[int] = []
        """Steps of saves that have begun and not ended, on this rank."""
        self._memory = Memory()
        self._aside: Kept = {}
        self._planner = Planner(group, mesh, deadline_s)
        self._free = threading.Event()
        self._free.set()
        self._capture = ThreadPoolExecutor(1, "holdfast-capture")
        self._persist = ThreadPoolExecutor(1, "holdfast-persist")
        self._tidying = ThreadPoolExecutor(1, "holdfast-tidy")

    # -- training thread --------------------------------------------------------------------------

    def begin(self, describe_live: Callable[[], Live], step: int, *, must: bool) -> Save:
        """Start a save of the live state.  `must`: wait for the one in flight, do not skip.

        Blocks for what the next forward pass may change; the rest is copied until the next
        optimizer step.
        """
        step_prefix(step)
        window = Window(step)
        with self._lock:
            busy = not must and bool(self._pending)
            self._pending.append(step)
        job = self._new_job(describe_live, step, window, busy=busy)
        self._gate.window = window
        self._capture.submit(self._guarded, self._do_capture, job)
        return job.save

    def prepare(self, describe_live: Callable[[], Live]) -> None:
        """Plan a save and have the memory for it ready.  Returns at once."""
        job = self._new_job(describe_live, 0, None, busy=False)
        self._capture.submit(self._guarded, self._do_capture, job)

    def _new_job(
        self, describe_live: Callable[[], Live], step: int, window: Window | None, *, busy: bool
    ) -> Job:
        """A job; what goes wrong here is its error, so that the other ranks learn of it."""
        self._number += 1
        job = Job(self._number, step, Save(step), window, Moment.of(Live()), busy)
        try:
            live = describe_live()
            if not busy:
                self._settle()
                set_aside(live, self._aside)
            job.moment = Moment.of(live)
        except Exception as error:
            job.error = error
        return job

    def _settle(self) -> None:
        """Wait for earlier captures: what was set aside for them must have gone into the image."""
        self._capture.submit(lambda: None).result()

    def close(self, timeout: float | None = None) -> None:
        """Wait for what is under way, for `deadline_s` unless told otherwise; Deadline after that."""
        limit = self.deadline_s if timeout is None else timeout
        try:
            self.settle(limit)
            self._memory.close()
        finally:
            self._gate.close()
            for pool in self._pools:
                pool.shutdown(wait=False)

    @property
    def _pools(self) -> tuple[ThreadPoolExecutor, ...]:
        return self._capture, self._persist, self._tidying

    def settle(self, limit_s: float) -> None:
        """Wait until nothing is under way; Deadline if that takes longer."""
        until = time.monotonic() + limit_s
        for pool in self._pools:
            try:
                pool.submit(lambda: None).result(max(until - time.monotonic(), 0.1))
            except (FutureTimeout, TimeoutError):
                raise Deadline(
                    f"a save was still under way after {limit_s:g} s",
                    hint="the storage may hang; the step is committed only if `holdfast ls` shows it",
                ) from None

    def adopt(self, claim: Claim) -> None:
        """Go on as another run: what is saved from now on is newer than all that was."""
        self.claim, self.run = claim, claim.run

    # -- capture thread ---------------------------------------------------------------------------

    def _guarded(self, work: Any, job: Job) -> None:
        try:
            work(job)
        except BaseException as error:
            job.close_window()
            self._release(job)
            if not job.save.done():
                self._finish(job, error)

    def _release(self, job: Job) -> None:
        """The image may be filled again."""
        if job.holds_image:
            job.holds_image = False
            self._free.set()

    def _end(self, job: Job) -> None:
        with self._lock:
            if job.window is not None and job.step in self._pending:
                self._pending.remove(job.step)

    def _finish(self, job: Job, error: BaseException | None) -> None:
        self._end(job)
        if error is None:
            took = time.perf_counter() - job.started
            emit("save.committed", step=job.step, seconds=round(took, 3))
            job.save._future.set_result(True)
        else:
            if isinstance(error, HoldfastError) and error.step is None:
                error.step = job.step
            what = "save.failed" if job.window is not None else "prepare.failed"
            emit(what, step=job.step, error=str(error))
            job.save._future.set_exception(error)

    def _do_capture(self, job: Job) -> None:
        self._ready(job)
        verdict = self._planner.agree(job)
        if verdict.errors:
            raise self._alike(f"save of step {job.step}", verdict.errors, job)
        if not verdict.go:
            self._skip(job)
            return
        job.verdict = verdict
        if verdict.describe:
            self._planner.make_plan(job, verdict.describe)
        if job.window is None:
            self._persist.submit(self._guarded, self._touch, job)
            return
        self._check_replicas(job)
        job.plan = self._planner.plan
        filling = Filling()
        image = self._try(lambda: self._planner.lay_out(job, self._memory, self._aside), filling)
        self._persist.submit(self._guarded, self._persister(image, filling), job)
        if image is not None:
            self._fill(job, image, filling)
        job.close_window()

    def _ready(self, job: Job) -> None:
        """Describe the state and take the image; an error is kept for the others to learn of."""
        try:
            job.description = describe(job.live)
            if not job.busy:
                self._take(job)
        except Exception as error:
            job.error = job.error or error

    def _alike(self, what: str, errors: dict[int, str], job: Job) -> BaseException:
        """The error of a failed save on this rank: its own if it is alone, else all ranks'."""
        if self.group.size == 1 and job.error is not None:
            return job.error
        together = RankErrors(what, errors, step=job.step)
        together.__cause__ = job.error
        return together

    @staticmethod
    def _try(work: Callable[[], Image], filling: Filling) -> Image | None:
        try:
            return work()
        except Exception as error:
            filling.fail(error)
            return None

    def _touch(self, job: Job) -> None:
        """Make memory for the image real, so that the first save does not have to."""
        self._planner.lay_out(job, self._memory, self._aside)
        touch(self._memory.view)
        self._release(job)

    def _check_replicas(self, job: Job) -> None:
        """If asked to: LayoutError on every rank if some replicas differ."""
        if self.replicas == "trust" or self.group.size == 1:
            return
        assert self._planner.plan is not None
        placement = self._planner.plan.placement
        mine = replica_digests(job.live, self._aside, placement, self.group.rank)
        names = placement.table.names
        self.group.ask(
            f"replicas/{job.number}", mine, lambda a: check_replicas(a, names), self.deadline_s
        )

    def _fill(self, job: Job, image: Image, filling: Filling) -> None:
        """Copy the live tensors into the image; a failure is the writer's to report."""
        try:
            assert job.plan is not None and job.plan.copies is not None
            retakes = MAX_RETAKES if self.group.size == 1 else 0
            copy_steadily(job.plan.copies, job.moment, filling, step=job.step, retakes=retakes)
            filling.advance(image.table_start)
            filling.complete()
        except BaseException as error:
            filling.fail(error)

    def _take(self, job: Job) -> None:
        """Wait for the image: the save before may still be writing it."""
        if not self._free.is_set():
            emit("save.queued", step=job.step)
        if not self._free.wait(self.deadline_s):
            raise Deadline(f"the save before did not end within {self.deadline_s:g} s")
        self._free.clear()
        job.holds_image = True

    def _skip(self, job: Job) -> None:
        self._release(job)
        job.close_window()
        self._end(job)
        job.save.skipped = True
        emit("save.skipped", step=job.step)
        job.save._future.set_result(False)

    # -- persist thread ---------------------------------------------------------------------------

    def _persister(self, image: Image | None, filling: Filling) -> Callable[[Job], None]:
        return lambda job: self._write_and_commit(job, image, filling)

    def _write_and_commit(self, job: Job, image: Image | None, filling: Filling) -> None:
        assert job.verdict is not None and job.plan is not None
        file = None
        attempt = self.attempt or f"{self.run:04d}-{job.number:06d}"
        try:
            with span("persist", step=job.step, bytes=image.total_bytes if image else 0):
                if image is not None and (image.pieces.total_bytes or image.extras_bytes):
                    path = f"{attempt}/r{self.group.rank:05d}.safetensors"
                    memory, rank = self._memory.view, self.group.rank
                    file = write_image(self.store, job.step, path, rank, memory, image, filling)
                else:  # this rank has nothing
                    filling.conclude()
        except Exception as failed:
            job.error = failed
        mine = self.group.rank
        extras = {k: job.live.extras[k] for k, ranks in job.verdict.send.items() if mine in ranks}
        written = Written(None if job.error is None else text_of(job.error), file, extras)
        try:
            answer = self.group.ask(
                f"commit/{job.number}",
                msgspec.msgpack.encode(written),
                lambda answers: self._decide(job, attempt, answers),
                self.deadline_s,
            )
        finally:
            self._release(job)
        outcome = msgspec.msgpack.decode(answer, type=Outcome)
        if outcome.errors:
            if not job.uncertain:
                self._discard(job.step, attempt)
            raise RankErrors(
                f"save of step {job.step}", outcome.errors, step=job.step
            ) from job.error
        self._finish(job, None)
        if mine == 0:
            self._tidying.submit(self._tidy, job)

    def _decide(self, job: Job, attempt: str, answers: list[bytes]) -> bytes:
        """Rank 0: commit if every rank has written."""
        written = [msgspec.msgpack.decode(a, type=Written) for a in answers]
        errors = {r: w.error for r, w in enumerate(written) if w.error is not None}
        if not errors:
            try:
                manifest = self._manifest(job, attempt, written)
                with self._committing:
                    job.replaced = attempt_of(self.store, job.step)
                    commit(self.store, manifest, self.claim)
            except Exception as error:
                errors = {0: f"commit: {text_of(error)}"}
                job.uncertain = isinstance(error, Unavailable)
        return msgspec.msgpack.encode(Outcome(errors))

    def _manifest(self, job: Job, attempt: str, written: list[Written]) -> Manifest:
        assert job.plan is not None and job.verdict is not None
        plan = job.plan.agreement
        extras = {k: v for k, v in job.live.extras.items() if k not in job.verdict.per_rank}
        for key, ranks in job.verdict.send.items():
            versions_ = [extras[key]] if key in extras else []
            versions_ += [written[r].extras[key] for r in ranks if r != 0]
            extras[key] = merge_extras(key, versions_)
        return Manifest(
            holdfast=VERSION,
            step=job.step,
            run=self.run,
            attempt=attempt,
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            software={"holdfast": __version__, "torch": str(torch.__version__)},
            mesh=plan.mesh,
            chunk_bytes=CHUNK_BYTES,
            algorithm=ALGORITHM,
            shardings=plan.shardings,
            tensors=plan.tensors,
            aliases=plan.aliases,
            files=tuple(w.file for w in written if w.file is not None),
            extras=extras,
            per_rank=job.verdict.per_rank,  # type: ignore[arg-type]
        )

    def _discard(self, step: int, attempt: str) -> None:
        """Best effort: what stays behind is swept after the next save that succeeds."""
        try:
            if self.group.rank == 0:
                discard(self.store, step, attempt)
        except HoldfastError as error:
            emit("discard.failed", step=step, error=str(error))

    def _tidy(self, job: Job) -> None:
        """After a commit: what it replaced, what `keep` lets go, what crashes left behind."""
        try:
            with span("tidy", step=job.step):
                if job.replaced is not None:
                    discard(self.store, job.step, job.replaced)
                prune(self.store, self.keep, spare=tuple(self._pending), lock=self._committing)
                if self.claim is not None:
                    sweep(self.store, self.claim, job.number)
        except Exception as error:
            emit("tidy.failed", error=str(error))
