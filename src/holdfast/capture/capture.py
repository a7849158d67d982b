"""The capture thread: it agrees with the other ranks, plans, and copies the live state into the image."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

from holdfast.capture.job import Save, SaveJob, text_of
from holdfast.capture.planning import Planner
from holdfast.errors import HoldfastError
from holdfast.events import emit
from holdfast.format.image import Image
from holdfast.garbage import uncollected
from holdfast.group import Group
from holdfast.layout import Mesh
from holdfast.state.agreed import describe
from holdfast.state.carrying import Room
from holdfast.state.live import Live, LiveTensor
from holdfast.state.replicas import Replicas
from holdfast.state.snapshot import (
    MAX_RETAKES,
    Beside,
    Buffer,
    Filling,
    Kept,
    Moment,
    Shot,
    copy_steadily,
    set_aside,
)
from holdfast.state.window import Gate, Window, resting
from holdfast.threads import Worker
from holdfast.wire import WireError, rank_errors


class Tier(Protocol):
    """The methods that a capture calls of whoever keeps the image."""

    name: str
    """Name of the tier in its events: `save`, `snapshot`."""

    def take(self, job: SaveJob) -> Buffer:
        """Memory for the image, which is the job's until `release`.  Blocks; Deadline."""

    def beside(self, job: SaveJob, image: Image, aside: Kept) -> Beside | None:
        """A reader of whatever else is to be read from the live tensors at the same moment."""

    def write(self, job: SaveJob, image: Image | None, filling: Filling) -> None:
        """Keep what `filling` fills, on a thread of the tier's own, which ends the job.

        No image: this rank could not lay one out, as `filling` says.
        """

    def warm(self, job: SaveJob) -> None:
        """Make the job's memory real, on a thread of the tier's own, and release it.  Raises its error."""

    def follows(self, job: SaveJob) -> bool:
        """True if the job is to be copied from a replica.  On the training thread."""

    def moment(self, job: SaveJob) -> Moment:
        """The state as that replica has it.  Blocks; HoldfastError if it has it no more."""

    def release(self, job: SaveJob) -> None:
        """The job needs its memory no more.  Safe to call twice."""

    def ended(self, job: SaveJob, error: BaseException | None) -> None:
        """The job is over, however."""


class Capture:
    """Fills images with the live state.  All ranks call its methods in the same order."""

    def __init__(
        self,
        group: Group,
        *,
        mesh: Mesh | None = None,
        deadline_s: float = 600.0,
        replicas: Literal["once", "verify", "trust"] = "once",
        carry_bytes: int = 0,
    ) -> None:
        self.group = group
        self.deadline_s = deadline_s
        self.replicas = Replicas(replicas)
        self.room = Room(carry_bytes)
        """Memory for what is not copied when the window ends."""
        self.planner = Planner(group, mesh, deadline_s)
        self._number = 0
        self._gate = Gate()
        self.aside: Kept = {}
        self._described: tuple[list[Any], dict[str, str], bytes] = [], {}, describe(Live())
        """`_told` of each tensor, the aliases, and the description that was made from both."""
        self._pool = Worker("holdfast-capture")

    # -- training thread --------------------------------------------------------------------------

    def begin(
        self,
        describe_live: Callable[[], Live],
        step: int,
        tier: Tier,
        *,
        busy: bool,
        durable: bool = False,
    ) -> Save:
        """Start an image of the live state.  `busy`: this rank would rather leave it out.
        `durable`: the tier shall see that it gets to storage.

        Blocks for what the next forward pass may change; the rest is copied until the next
        optimizer step.
        """
        window = Window(step)
        job = self._new_job(describe_live, step, window, busy=busy)
        job.durable = durable
        job.save.kind = job.kind(tier.name)
        job.follows = job.error is None and not busy and tier.follows(job)
        if job.follows or busy:
            window.done()
        if not busy:  # else the copy under way still needs the one before
            self._gate.window = window
        self._pool.submit(guarded, self._capture, job, tier)
        return job.save

    def prepare(self, describe_live: Callable[[], Live], tier: Tier) -> Save:
        """Plan an image and have the memory for it ready.  Returns at once."""
        job = self._new_job(describe_live, 0, None, busy=False)
        self._pool.submit(guarded, self._capture, job, tier)
        return job.save

    def _new_job(
        self, describe_live: Callable[[], Live], step: int, window: Window | None, *, busy: bool
    ) -> SaveJob:
        """A job; what goes wrong here is its error, so that the other ranks learn of it."""
        self._number += 1
        job = SaveJob(self._number, step, Save(step), window, Moment.of(Live()), busy)
        try:
            with uncollected():
                live = describe_live()
            if not busy:
                self._settle()
                set_aside(live, self.aside)
            job.moment = Moment.of(live)
        except Exception as error:
            job.error = error
        return job

    def _settle(self) -> None:
        """Wait for earlier captures: what was set aside for them must have gone into the image.

        They end, for whatever they wait for has a deadline.
        """
        self.settle(None)

    @property
    def next_number(self) -> int:
        """Number that the next job will have."""
        return self._number + 1

    def settle(self, limit_s: float | None) -> None:
        """Wait until no capture is under way; TimeoutError if that takes longer."""
        with resting():
            self._pool.settle(limit_s)

    def close(self) -> None:
        """Let every later optimizer step pass."""
        self._gate.close()
        self._pool.shutdown()

    # -- capture thread ---------------------------------------------------------------------------

    def _capture(self, job: SaveJob, tier: Tier) -> None:
        self._ready(job, tier)
        verdict = self.planner.agree(job)
        if verdict.errors:
            raise self._alike(f"{job.kind(tier.name)} of step {job.step}", verdict.errors, job)
        if not verdict.go:
            skip(job, tier)
            return
        job.verdict = verdict
        if verdict.describe:
            self.planner.make_plan(job, verdict.describe)
            self.replicas.is_due = True
        if job.window is None:
            self._try_out(job)
            self._make_room(job)
            tier.warm(job)
            return
        self._check_replicas(job)
        job.plan = self.planner.plan
        filling = Filling()
        image = self._try(lambda: self._lay_out(job, tier), filling)
        beside = self._beside(job, tier, image)
        tier.write(job, image, filling)
        if image is not None:
            self._fill(job, image, filling, beside)
        job.close_window()

    def _try_out(self, job: SaveJob) -> None:
        """Lay an image out in real memory; an error is the tier's to report, for the others wait for it."""
        job.plan = self.planner.plan
        try:
            self.planner.lay_out(job, self.aside)
        except Exception as error:
            job.error = error

    def _lay_out(self, job: SaveJob, tier: Tier) -> Image:
        if job.follows:
            job.moment = tier.moment(job)
        return self.planner.lay_out(job, self.aside)

    def _make_room(self, job: SaveJob) -> None:
        if self.room.size and job.copies is not None:
            self.room.make(source.device for source in job.copies.sources)

    def _beside(self, job: SaveJob, tier: Tier, image: Image | None) -> Beside | None:
        """The tier's reader; None if it fails: it is dispensable, and other ranks wait for this."""
        if image is None:
            return None
        try:
            return tier.beside(job, image, self.aside)
        except Exception as error:
            emit("beside.failed", step=job.step, error=text_of(error))
            return None

    def _ready(self, job: SaveJob, tier: Tier) -> None:
        """Describe the state and take memory; an error is kept for the others to learn of."""
        try:
            with uncollected():
                job.description = self._describe(job.live)
            if not job.busy:
                job.buffer = tier.take(job)
        except Exception as error:
            job.error = job.error or error

    def _describe(self, live: Live) -> bytes:
        """Describe the state: as before, if each tensor is the very one of then, or lies alike."""
        tensors, aliases, description = self._described
        now = [_told(t) for t in live.tensors.values()]
        same = len(now) == len(tensors) and all(map(_is_same, now, tensors))
        if not same or live.aliases != aliases:
            description = describe(live)
            self._described = now, live.aliases, description
        return description

    def _alike(self, what: str, errors: dict[int, WireError], job: SaveJob) -> BaseException:
        """The error of a failed job on this rank: its own if it is alone, else all ranks'."""
        if self.group.size == 1 and job.error is not None:
            return job.error
        together = rank_errors(what, errors, job.step)
        together.__cause__ = job.error
        return together

    @staticmethod
    def _try(work: Callable[[], Image], filling: Filling) -> Image | None:
        try:
            return work()
        except Exception as error:
            filling.fail(error)
            return None

    def _check_replicas(self, job: SaveJob) -> None:
        """LayoutError on every rank if some replicas differ that are not known to agree."""
        assert self.planner.plan is not None
        placement = self.planner.plan.placement
        name = f"replicas/{job.number}"
        # what a replica on the host is copied from, the training changes meanwhile
        live = None if job.follows else job.live
        try:
            self.replicas.check(
                name,
                live,
                self.aside,
                placement,
                self.group,
                self.deadline_s,
                f"compared its replicas for {job.in_words}",
            )
        except BaseException:
            self.planner.plan = None  # so that all ranks plan, and compare, anew
            raise

    def _fill(self, job: SaveJob, image: Image, filling: Filling, beside: Beside | None) -> None:
        """Copy the live tensors into the image; a failure is the tier's to report."""
        try:
            assert job.copies is not None and job.window is not None
            shot = Shot(job.copies, job.moment, filling, image.table_start, job.step, beside)
            copy_steadily(
                shot,
                job.window,
                room=None if job.follows else self.room,
                retakes=MAX_RETAKES if self.group.size == 1 and not job.follows else 0,
                rest_s=self.deadline_s,
            )
            filling.complete()
        except BaseException as error:
            filling.fail(error)


def _told(tensor: LiveTensor) -> Any:
    """Return a value that tells whether a tensor lies as before: a steady one itself; of others, which are
    not to be kept alive, all that is described."""
    if tensor.steady:
        return tensor
    parts = tuple((part.shape, part.box, part.cuts) for part in tensor.parts)
    return tensor.name, tensor.state, tensor.placed.dtype, parts


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, tuple) and one == other)


def guarded(work: Callable[[SaveJob, Tier], Any], job: SaveJob, tier: Tier) -> None:
    """Do part of a job; an error ends it."""
    try:
        work(job, tier)
    except BaseException as error:
        job.close_window()
        tier.release(job)
        if not job.save.done():
            finish(job, tier, error)


def finish(job: SaveJob, tier: Tier, error: BaseException | None) -> None:
    """The job has succeeded, or failed with `error`."""
    tier.ended(job, error)
    if error is None:
        took = time.perf_counter() - job.started
        emit(f"{job.kind(tier.name)}.committed", step=job.step, seconds=round(took, 3))
        job.save._future.set_result(True)
    else:
        if isinstance(error, HoldfastError) and error.step is None and job.window is not None:
            error.step = job.step
        what = job.kind(tier.name) if job.window is not None else "prepare"
        emit(f"{what}.failed", step=job.step, error=text_of(error))
        job.save._future.set_exception(error)


def skip(job: SaveJob, tier: Tier) -> None:
    """The job is left out: some rank was busy."""
    tier.release(job)
    job.close_window()
    job.save.skipped = True
    tier.ended(job, None)
    emit(f"{job.kind(tier.name)}.skipped", step=job.step)
    job.save._future.set_result(False)
