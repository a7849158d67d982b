"""One save on one rank, from the call to the manifest.

A save goes through five phases, on three threads.  Each thread ends where it hands over to the next:

    training     collect   name and place the state; set aside tensors that its optimizers do not write
    saving       agree     on the step, and who saves which bytes; make a new plan if layouts have changed
                 copy      lay the image out, and fill it in the window that ends with the next step
    the keeper's keep      store the bytes, behind the copier
                 commit    rank 0 writes the manifest, if every rank has kept its part

The phases pass on a `StateView`, an `AgreedSave`, a `Draft`, a file.  Ranks learn of an error on one rank
when they agree next, so a save ends alike on all of them; an error that no other rank waits for ends the
operation at once.  In every case the window is closed, the memory released, and the handle concluded, in
this order.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.base.errors import HoldfastError
from holdfast.base.events import emit
from holdfast.base.gc_pause import uncollected
from holdfast.base.threads import Worker
from holdfast.base.wire import WireError, rank_errors
from holdfast.core.format.image import Image
from holdfast.live.saving.exactness import Exactness
from holdfast.live.saving.handle import Save, error_text
from holdfast.live.saving.messages import Verdict
from holdfast.live.saving.planning import PlannedImage, SavePlan
from holdfast.live.state.named import Collected
from holdfast.live.state.snapshot import (
    Buffer,
    CopyTap,
    FillProgress,
    Shot,
    StateView,
    WrittenMeanwhile,
    copy_in_window,
    set_aside,
)
from holdfast.live.state.window import Window

if TYPE_CHECKING:
    from holdfast.live.saving.attaching import Attached
    from holdfast.live.saving.saver import Saver
    from holdfast.live.state.replicas import Replicas


@dataclass(frozen=True)
class Request:
    """The arguments of a save."""

    step: int
    _: KW_ONLY
    busy: bool = False
    """True if this rank wants to leave it out, because another save is in flight."""
    yields: bool = False
    """True if it is left out rather than wait for storage that does not answer."""
    durable: bool = False
    """True for a snapshot that goes on to storage."""
    is_rehearsal: bool = False
    """True if nothing is saved: only the plan is made, and the memory touched, for the first save."""
    attached: Attached | None = None
    """On rank 0: files and metrics of the step."""
    made: float = field(default_factory=time.perf_counter)
    """Time of the call, in seconds of `time.perf_counter`."""


@dataclass(frozen=True)
class AgreedSave:
    """The agreement of all ranks, and this rank's memory for its part."""

    verdict: Verdict
    plan: SavePlan
    description: bytes
    buffer: Buffer


@dataclass(frozen=True)
class Draft:
    """This rank's part of a save while it is copied; a tier keeps it."""

    agreed: AgreedSave
    moment: StateView
    filling: FillProgress
    """How far the image is filled."""
    layout: PlannedImage | None = None
    """The image, and the copies that fill it; None if laying it out failed: `filling` has the error."""
    exactness: Exactness | None = None
    """Exactness of an image that is copied from a replica; else None."""

    @property
    def plan(self) -> SavePlan:
        return self.agreed.plan

    @property
    def buffer(self) -> Buffer:
        return self.agreed.buffer

    @property
    def live(self) -> Collected:
        return self.moment.live

    @property
    def image(self) -> Image | None:
        """The image, if this rank has any bytes to save."""
        image = self.layout[0] if self.layout is not None else None
        return None if image is None or image.is_empty else image


class Keeper(Protocol):
    """Keeps images, in storage or in memory: three methods, and a thread for the second."""

    kind: str
    """Name of its saves in events: `save`, `snapshot`."""
    worker: Worker

    def take(self, op: SaveOperation) -> Buffer:
        """Return memory for the image, which belongs to the operation until `release`.  Blocks;
        Deadline."""

    def keep(self, op: SaveOperation, draft: Draft) -> None:
        """Keep the image while it is filled, commit it with the other ranks, and end the operation.  Runs
        on `worker`; an error also ends the operation.  For a rehearsal, only touch the memory."""

    def release(self, op: SaveOperation) -> None:
        """Take the operation's memory back, if it has taken any.  Called once."""


class Replica(Protocol):
    """A copy of the state on the host that repeats the training's steps."""

    @property
    def exactness(self) -> Exactness:
        """The exactness of the copy."""

    def moment(self, op: SaveOperation, plan: SavePlan) -> StateView:
        """Return the replica's state at the step of the call.  Blocks; HoldfastError if the replica is
        lost."""


class Companion(Protocol):
    """Further work of a tier with the state at the moment of a save: the rare cases of a copy."""

    def mark(self, op: SaveOperation) -> None:
        """Note the moment, on the training thread, before the state is read.  An error fails the save."""

    def replica(self, op: SaveOperation) -> Replica | None:
        """Return the replica to copy from; None for the live tensors.  On the training thread, at the
        call."""

    def beside(self, op: SaveOperation, draft: Draft) -> CopyTap | None:
        """Return a second reader of the live tensors at the same moment, if the tier needs one."""


@dataclass
class CommitOutcome:
    """The outcome of a commit, on rank 0."""

    replaced: str | None = None
    """The attempt of the step that the commit replaced."""
    is_uncertain: bool = False
    """True if storage did not answer, so the manifest may still appear."""


class SaveOperation:
    """One save on this rank."""

    def __init__(
        self,
        saver: Saver,
        keeper: Keeper,
        number: int,
        request: Request,
        *,
        companion: Companion | None,
        on_end: Callable[[SaveOperation, BaseException | None], None],
    ) -> None:
        """`number`: the same on all ranks.  `on_end`: called once, before the handle is concluded."""
        self.saver = saver
        self.keeper = keeper
        self.number = number
        self.request = request
        self.companion = companion
        self.save = Save(request.step, self.kind)
        self.window = Window(request.step)
        self.moment = StateView.of(Collected(), {})
        self.replica: Replica | None = None
        """Copied instead of the live tensors, if there is one."""
        self.error: BaseException | None = None
        """This rank's error, which the other ranks have to learn."""
        self.outcome = CommitOutcome()
        self._on_end = on_end
        self.must_hold = False
        """True if training must wait until all is copied."""
        self.has_memory = False
        """True once the keeper has given it memory."""
        self._is_released = False

    @property
    def step(self) -> int:
        return self.request.step

    @property
    def live(self) -> Collected:
        """The state as it was at the call."""
        return self.moment.live

    @property
    def kind(self) -> str:
        """Name of the save in events: its keeper's, but a snapshot that goes on to storage is a save."""
        return "save" if self.request.durable else self.keeper.kind

    @property
    def in_words(self) -> str:
        """Text for messages about waiting ranks: `the save of step 1`."""
        if self.request.is_rehearsal:
            return "to prepare its saves"
        return f"the {self.kind} of step {self.step}"

    # -- collect: training thread -----------------------------------------------------------------

    def collect(self, describe_live: Callable[[], Collected]) -> None:
        """Take the state as it is now.  An exception becomes the operation's error, so that the other ranks
        learn of it.

        Blocks while tensors are set aside; the others are copied until the window ends.
        """
        busy = self.request.busy
        try:
            if self.companion is not None:
                self.companion.mark(self)
            with uncollected():
                live = describe_live()
            if not busy:
                # earlier saves must have copied the tensors that were set aside for them
                self.saver.settle(None)
                with uncollected():
                    self.must_hold = self.saver.copy_timing.sort(live)
                    set_aside(live, self.saver.aside)
            self.moment = StateView.of(live, self.saver.copy_timing.corners_at_call(live))
            if self.companion is not None and not busy and not self.request.is_rehearsal:
                self.replica = self.companion.replica(self)
        except Exception as error:
            self.error = error
        if self.replica is not None or busy or self.request.is_rehearsal:
            self.must_hold = False
            self.window.done()
        elif self.error is None and live.aside.issuperset(live.tensors):
            self.window.done()  # all is copied

    def interrupted_by(self, error: BaseException) -> None:
        """Have the other ranks learn that this rank's call did not come to its end."""
        if not isinstance(error, Exception):
            error = HoldfastError(f"interrupted by {type(error).__name__}")
        self.error = self.error or error
        self.window.done()

    # -- agree, copy: saving thread ---------------------------------------------------------------

    def run(self) -> None:
        """Agree with the other ranks, hand the draft to the keeper, and fill its image meanwhile."""
        agreed = self._agree()
        if agreed is None:
            self._leave_out()
            return
        if self.saver.replicas is not None and not self.request.is_rehearsal:
            self._check_replicas(self.saver.replicas, agreed.plan, agreed.verdict)
        draft = self._draft(agreed)
        if self.request.is_rehearsal:
            self.saver.make_room(draft)
            self._hand_over(draft)
        else:
            beside = self._beside(draft)
            self._hand_over(draft)
            self._copy(draft, beside)
            self.window.done()

    def _agree(self) -> AgreedSave | None:
        """Agree with all ranks; None if a rank is busy.  RankErrors if one cannot save."""
        description, buffer = b"", None
        try:
            with uncollected():
                description = self.saver.describe(self.live)
            if not self.request.busy:
                buffer = self.keeper.take(self)
                self.has_memory = True
        except Exception as error:
            self.error = self.error or error
        verdict = self.saver.planner.agree(self, description)
        if verdict.errors:
            raise self._alike(verdict.errors)
        if buffer is None or not verdict.go:
            return None
        plan = self.saver.planner.plan_for(self, description, verdict)
        if verdict.describe and self.saver.replicas is not None:
            self.saver.replicas.is_due = True
        return AgreedSave(verdict, plan, description, buffer)

    def _alike(self, errors: dict[int, WireError]) -> BaseException:
        """Return the error of a failed save: this rank's own if it is the only rank, else RankErrors."""
        if self.saver.group.size == 1 and self.error is not None:
            return self.error
        together = rank_errors(f"{self.kind} of step {self.step}", errors, self.step)
        together.__cause__ = self.error
        return together

    def _check_replicas(self, replicas: Replicas, plan: SavePlan, verdict: Verdict) -> None:
        """LayoutError on every rank if replicas differ."""
        # with a replica on the host, training changes the live state meanwhile
        live = None if self.replica is not None else self.live
        replicas.next_round(verdict.round)
        try:
            replicas.check(
                f"replicas/{self.number}",
                live,
                self.saver.aside,
                plan.placement,
                self.saver.group,
                self.saver.deadline_s,
                f"compared its replicas for {self.in_words}",
                doubted=verdict.doubted,
            )
        except BaseException:
            self.saver.planner.plan = None  # so that all ranks plan, and compare, anew
            raise

    def _draft(self, agreed: AgreedSave) -> Draft:
        """Lay the image out in its memory.  The keeper reports a failure, because other ranks wait for
        it."""
        filling = FillProgress()
        try:
            moment, exactness = self._moment_to_copy(agreed.plan)
            layout = self.saver.planner.lay_out(agreed, moment.live, self.saver.aside)
            self.save.image_bytes = layout[0].total_bytes
            return Draft(agreed, moment, filling, layout, exactness)
        except Exception as error:
            self.error = error
            filling.fail(error)
            return Draft(agreed, self.moment, filling)

    def _moment_to_copy(self, plan: SavePlan) -> tuple[StateView, Exactness | None]:
        """Return the replica's state and exactness; without a replica, the state at the call."""
        if self.replica is None:
            return self.moment, None
        return self.replica.moment(self, plan), self.replica.exactness

    def _beside(self, draft: Draft) -> CopyTap | None:
        """Return the companion's reader; None if that fails, because the save can do without it."""
        if self.companion is None or self.replica is not None or draft.layout is None:
            return None
        try:
            return self.companion.beside(self, draft)
        except Exception as error:
            emit("beside.failed", step=self.step, error=error_text(error))
            return None

    def _hand_over(self, draft: Draft) -> None:
        """Hand the image to the keeper's thread while it is being filled."""
        self.keeper.worker.submit(self.guarded, self.keeper.keep, self, draft)

    def _copy(self, draft: Draft, beside: CopyTap | None) -> None:
        """Fill the image; the keeper reports a failure."""
        if draft.layout is None:
            return
        image, copies = draft.layout
        stop, copy_timing = image.table_start, self.saver.copy_timing
        shot = Shot(copies, draft.moment, draft.filling, stop, self.step, copy_timing, beside)
        try:
            room = self.saver.room if self.replica is None else None
            copy_in_window(shot, self.window, room=room)
            draft.filling.complete()
        except BaseException as error:
            if isinstance(error, WrittenMeanwhile):
                copy_timing.learn({*error.names})
            draft.filling.fail(error)

    # -- the end: any thread ----------------------------------------------------------------------

    def guarded(self, work: Callable[..., None], *args: Any) -> None:
        """Run a part of the operation; an error ends the operation."""
        try:
            work(*args)
        except BaseException as error:
            self.window.done()
            self.release()
            if not self.save.done():
                self.end(error)
            traceback.clear_frames(error.__traceback__)  # else the error would keep the state alive
            del work, args

    def release(self) -> None:
        """Give the memory back to the keeper, so that the next save may begin.  Safe to call twice."""
        if not self._is_released:
            self._is_released = True
            self.keeper.release(self)

    @property
    def took_s(self) -> float:
        """Seconds since the call."""
        return time.perf_counter() - self.request.made

    def end(self, error: BaseException | None = None) -> None:
        """End the operation: it has succeeded, or failed with `error`."""
        if (
            isinstance(error, HoldfastError)
            and error.step is None
            and not self.request.is_rehearsal
        ):
            error.step = self.step
        try:
            self._on_end(self, error)
            if error is not None:
                kind = "prepare" if self.request.is_rehearsal else self.kind
                emit(f"{kind}.failed", step=self.step, error=error_text(error))
            elif not self.request.is_rehearsal:
                self.save.seconds = took = self.took_s
                emit(f"{self.kind}.committed", step=self.step, seconds=round(took, 3))
        except BaseException as failed:
            error = error or failed
            raise
        finally:  # whoever waits for it must hear of its end
            self.moment = StateView.of(Collected(), {})
            self.save._conclude(error)

    def _leave_out(self) -> None:
        """End the operation without a save: some rank was busy."""
        self.release()
        self.window.done()
        self.save.skipped = True
        self._on_end(self, None)
        emit(f"{self.kind}.skipped", step=self.step)
        self.save._conclude()
