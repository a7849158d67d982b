"""The home behind the root: what is committed in the root is copied on to a second store.

The training thread does a line of bookkeeping at each save.  One thread of each rank does the rest,
in rounds.  A round uploads one step:

    all ranks    which    each names the newest save that it knows to be committed (`waiting.py`);
                          rank 0 takes the newest that all of them know, and states its attempt
    each rank    copy     its own files of that step, part by part, each chunk verified by its digest
    rank 0       commit   when every rank has copied: the manifest, byte for byte that of the root
    rank 0       tidy     what `upload_keep` lets go, and what dead runs have left

`behind.py` has the code by which a rank copies, commits and tidies.

Why ranks agree on a step: if storage is slower than saves come, steps are left out, and the newest
is taken.  If each rank chose alone, one would copy step 20 and another step 30, and no step would
ever be whole.  For the same reason only one step is on its way: files of any other step without a
manifest behind the root are not needed.

The first round of a run takes the newest step of the root, if it is newer than all that were
uploaded: the run before may have died before it uploaded that step.

A failure costs the upload, never the training.  A step that could not be uploaded is tried again,
with longer and longer pauses, until a newer one has come or the run ends.  The user is told of the
first failure of an outage, and of its end (`news.py`).

Invariants:

* *must*: a manifest is put behind the root only when all its files are there, and while the claim
  stands;
* *must*: both homes have the same bytes under one key of `steps/`;
* *should*: copying takes at most `PART_BYTES` (`checkpoint.transfer`) of memory, two chunks, and
  the buffers of a `Writer` of the store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from holdfast.base.errors import FormatError, NotFound, UsageError
from holdfast.base.events import emit, span
from holdfast.base.threads import Worker, step_back
from holdfast.base.wire import WireError, decode_msgpack
from holdfast.core.checkpoint.claiming import Claim
from holdfast.core.checkpoint.names import Saved, manifest_key
from holdfast.core.checkpoint.tidying import Keep
from holdfast.core.format.manifest import Manifest, decode_manifest
from holdfast.core.group import Group
from holdfast.core.store import Store
from holdfast.live.saving import Save
from holdfast.live.saving.progress import TierProgress
from holdfast.live.saving.steps import Follower, RootSteps
from holdfast.live.tier import LogOfRun, Tier
from holdfast.tiers.mirror.behind import HomeBehind
from holdfast.tiers.mirror.homes import needs_another_save
from holdfast.tiers.mirror.news import UploadNews
from holdfast.tiers.mirror.waiting import Newest, WaitingSaves

if TYPE_CHECKING:
    from holdfast.live.restore.candidates import Candidate
    from holdfast.live.shelves import Shelf
    from holdfast.tiers.mirror.records import RecordUpload

PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0
"""Seconds from a failed upload to the next try: they double from the first number up to the second."""
LAST_PAUSE_S = 1.0
"""The same while `close` waits."""
LEAST_S = 0.1
"""Seconds that `close` gives records, however long the last step took."""
LOST_S = 5.0
"""Seconds that `close` gives records where a rank is lost: the launcher waits for this one to leave."""
UNFINISHED_S = 30.0
"""Seconds that a run which ends by an error waits for its upload."""
COPY_S = 6 * 3600.0
"""Seconds that rank 0 waits for another rank's part of an upload."""
NICENESS = 10
"""Niceness of the thread that uploads, so that the training goes first."""


class Choice(msgspec.Struct, frozen=True, array_like=True):
    """The step that all ranks upload in a round; an empty attempt means that there is none."""

    number: int
    step: int = -1
    attempt: str = ""


class RoundOutcome(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of a round.  Its verdict is one of

    * `uploaded`;
    * `nothing`: there was no such step in the root;
    * `gone`: the step was deleted from the root, or saved anew;
    * `given up`: the step is damaged;
    * `again`: it is tried again later;
    * `ended`: this run uploads nothing more.
    """

    verdict: str
    error: WireError | None = None


class Upload(Tier, Follower):
    """Copies the steps of a root to another store.

    All ranks call its methods in the same order, but for those of a `Follower`.
    """

    name = "upload"
    outlives = True

    def __init__(
        self, steps: RootSteps, store: Store, group: Group, claim: Claim, keep: Keep
    ) -> None:
        """Begin with the newest step of the root, unless the store has it.  `steps`: those of the root."""
        self.group = group
        self.home = HomeBehind(steps, store, claim, keep)
        self._steps = steps
        self._waiting = WaitingSaves()
        self._news = UploadNews(steps.store, store, group.rank)
        self.news = self._news.messages
        self._shelf: Shelf | None = None
        """The steps behind the root, as a restart has found them."""
        self._reading: tuple[int, ...] = ()
        """The step that is being copied, on rank 0."""
        steps.followers.append(self)
        self._records: RecordUpload | None = None
        self.progress: TierProgress = TierProgress()
        self._copied_bytes = 0
        """Bytes that this rank has copied in the last round."""
        self._num_rounds = 0
        self._is_closing = False
        self._has_ended = False
        self._retry = Retry()
        self._worker = Worker("holdfast-upload")
        self._worker.submit(step_back, NICENESS)
        self._begin()

    # -- training thread --------------------------------------------------------------------------

    def saving(self, save: Save) -> None:
        """Upload the step of a save when it is committed, unless a newer one is by then."""
        save.add_done_callback(partial(self._done, self._waiting.next_number()))

    def copy_records(self, log: LogOfRun) -> None:
        """Upload records, too.  The root's log keeps the records after the newest uploaded step, unless
        uploads fail."""
        from holdfast.tiers.mirror.records import RecordUpload

        home = self.home
        home.log = log.follower
        self._records = RecordUpload(
            home.root, home.store, self.group, log.upload_every_s, flush=log.flush, news=self.news
        )

    def unheard(self) -> list[str]:
        """Return the messages that the user would get if the run ended now."""
        records = [] if self._records is None else self._records.left()
        return [*self.news, *self._left(), *records]

    # -- the steps of the root, on rank 0 ---------------------------------------------------------

    def noted(self) -> None:
        """Carry labels and metrics that have changed to the home behind, without an upload."""
        self.home.notes_lag = True
        with suppress(RuntimeError):  # it is closed
            self._worker.submit(self.home.carry_notes)

    def reading(self) -> tuple[int, ...]:
        return self._reading

    def needed(self) -> list[Saved]:
        """Return the newest step behind the root, whose records have to come there, too; none in an
        outage."""
        newest = self.home.newest
        return [] if newest is None or self._news.is_outage else [newest]

    # -- a restart --------------------------------------------------------------------------------

    def shelf(self) -> Shelf:
        """List the steps, and the records beside them."""
        from holdfast.live.shelves import StoredShelf

        self._shelf = StoredShelf(self.home.store, self.group, tier=self.name, records=True)
        return self._shelf

    def lacks(self, taken: Candidate, root: Shelf, *, num_replayed: int) -> bool:
        """See `needs_another_save`."""
        assert self._shelf is not None
        return needs_another_save(taken, root, self._shelf, self.group, num_replayed=num_replayed)

    def pause(self) -> AbstractContextManager[object]:
        return self.home.committing

    def adopt(self, claim: Claim, base: int | None) -> None:
        self.home.go_on(claim, base)

    # -- the end ----------------------------------------------------------------------------------

    def close(self, limit_s: float, *, finished: bool, is_asked: bool) -> None:
        """Wait for the newest step, after an error for `UNFINISHED_S` at most; then tell the user what is
        not uploaded.  If a rank is lost no step can be uploaded, and only records are waited for."""
        if not (finished or is_asked):
            limit_s = min(limit_s, UNFINISHED_S)
        if self.group.lost:
            limit_s = min(limit_s, LOST_S)
        self._is_closing = True
        self._retry.cancel()
        self._begin()
        if self.home.notes_lag:
            self.noted()
        until = time.monotonic() + limit_s
        with suppress(TimeoutError):
            self._worker.settle(LEAST_S if self.group.lost else limit_s)
        self._has_ended = True
        self._worker.shutdown()
        if self._records is not None:
            self._records.close(max(until - time.monotonic(), LEAST_S))
        self.news.extend(self._left())

    def _left(self) -> list[str]:
        """Say what is not uploaded, on rank 0."""
        step, lost = self._waiting.last_step(), self.group.lost
        return self._news.left(step, lost, notes_lag=self.home.notes_lag)

    # -- any thread -------------------------------------------------------------------------------

    def _done(self, number: int, save: Save) -> None:
        """Note that a save has ended, and upload it if it is committed."""
        if save.error is None and not save.skipped:
            self.progress.begin(save.step)
            self._waiting.add(number, save)
            self._begin()

    def _begin(self) -> None:
        with suppress(RuntimeError):  # it is closed
            self._worker.submit(self._drain)

    # -- upload thread ----------------------------------------------------------------------------

    def _drain(self) -> None:
        """Upload until nothing newer waits, or a round fails; while `close` waits, until it ends, or a rank
        is lost."""
        while self._waiting.has_newer and not (self._has_ended or self.group.lost):
            if self._round():
                continue
            if not self._is_closing:
                self._try_again_later()
                return
            if not self._has_ended:
                time.sleep(LAST_PAUSE_S)

    def _try_again_later(self) -> None:
        if not self._has_ended:
            self._retry.after_a_pause(self._begin)

    def _round(self) -> bool:
        """Upload the newest step that all ranks know.  True if its save is settled."""
        self._num_rounds += 1
        began = time.monotonic()
        choice = Choice(0)
        try:
            choice = self._choose()
            outcome = self._upload(choice) if choice.attempt else RoundOutcome("nothing")
        except Exception as error:  # the other ranks cannot be reached
            outcome = RoundOutcome("again", WireError.of(error))
        self._tell(choice, outcome, time.monotonic() - began)
        if self.group.rank == 0 and self._reading:
            self._reading = ()
            self._steps.tidy_again(choice.step)
        if outcome.verdict in ("again", "ended"):
            self._has_ended = outcome.verdict == "ended"
            return False
        self._settle(choice, outcome)
        if self.group.rank == 0 and choice.attempt:
            self.home.tidy(choice.step)
        return True

    def _choose(self) -> Choice:
        """Agree on the step to upload."""
        answer = self.group.ask(
            f"upload-which/{self._num_rounds}",
            msgspec.msgpack.encode(self._waiting.newest),
            self._decide,
            awaited="ended its save, to be uploaded",
        )
        return decode_msgpack(answer, Choice)

    def _decide(self, answers: list[bytes]) -> bytes:
        """Rank 0: choose the newest step that all ranks know, with its attempt in the root now."""
        known = min((decode_msgpack(a, Newest) for a in answers), key=lambda k: k.number)
        step = known.step if known.number else self.home.left_by_earlier_runs()
        self._reading = () if step is None else (step,)
        attempt = None if step is None else self.home.attempt_of(step)
        if step is None or attempt is None:
            return msgspec.msgpack.encode(Choice(known.number))
        return msgspec.msgpack.encode(Choice(known.number, step, attempt))

    def _upload(self, choice: Choice) -> RoundOutcome:
        """Copy this rank's files, and wait for rank 0's verdict."""
        key, error, manifest, data = manifest_key(choice.step), None, None, b""
        with span("upload", step=choice.step) as fields:
            try:
                data = self.home.root.get(key)
                manifest = decode_manifest(data, key)
                self._check_attempt(manifest, choice)
                fields["bytes"] = self._copied_bytes = self._copy(manifest)
            except Exception as failed:
                error = WireError.of(failed)
            answer = self.group.ask(
                f"upload/{self._num_rounds}",
                msgspec.msgpack.encode(error),
                lambda answers: self._conclude(choice, manifest, data, answers),
                COPY_S,
                f"uploaded its part of step {choice.step}",
            )
        return decode_msgpack(answer, RoundOutcome)

    def _check_attempt(self, manifest: Manifest, choice: Choice) -> None:
        if manifest.attempt != choice.attempt:
            raise NotFound(f"step {choice.step} was saved anew", step=choice.step)

    def _copy(self, manifest: Manifest) -> int:
        """Copy this rank's files, and its share of those of a run on more ranks."""
        wanted = [f for f in manifest.objects if f.rank % self.group.size == self.group.rank]
        return self.home.copy(manifest, wanted, is_repeated=self._news.is_outage)

    def _conclude(
        self, choice: Choice, manifest: Manifest | None, data: bytes, answers: list[bytes]
    ) -> bytes:
        """Rank 0: commit, if every rank has copied its files."""
        given = [decode_msgpack(a, WireError | None) for a in answers]
        errors = [error for error in given if error is not None]
        if not errors and manifest is not None:
            try:
                self.home.commit(manifest, data)
            except Exception as error:
                errors = [WireError.of(error)]
        verdict = self._verdict(choice, errors)
        return msgspec.msgpack.encode(RoundOutcome(verdict, errors[0] if errors else None))

    def _verdict(self, choice: Choice, errors: list[WireError]) -> str:
        """Return the verdict on a round with these errors."""
        if not errors:
            return "uploaded"
        if self.home.attempt_of(choice.step) != choice.attempt:
            return "gone"
        found = [error.error() for error in errors]
        if any(isinstance(error, UsageError) for error in found):
            return "ended"
        if any(isinstance(error, FormatError) for error in found):
            return "given up"
        return "ended" if self._is_closing else "again"

    def _settle(self, choice: Choice, outcome: RoundOutcome) -> None:
        """Settle this save, and those before it, which are left out."""
        self._retry.shorten()
        for number, save in self._waiting.settle(choice.number).items():
            self.progress.leave(save.step)
            if number == choice.number and outcome.verdict == "uploaded":
                save.uploaded = True
            elif number != choice.number:
                emit("upload.skipped", step=save.step)
                self._news.left_out(save.step)

    def _tell(self, choice: Choice, outcome: RoundOutcome, took_s: float) -> None:
        """Emit the event of a round, and add the messages of `UploadNews` on rank 0."""
        error, step = outcome.error, choice.step
        if outcome.verdict == "uploaded":
            emit("upload.committed", step=step, seconds=round(took_s, 3))
            self.progress.keep(step, took_s, self._copied_bytes)
            self._news.recovered(step)
            return
        if error is None:
            if choice.number == 0:  # the home behind was listed, so it answers
                self._news.recovered(None)
            return
        if outcome.verdict == "gone":  # a newer one has taken its place
            emit("upload.skipped", step=step)
            return
        emit("upload.failed", step=step, error=error.text)
        self.progress.failed(error.text)
        trouble = self._news.failed(step, outcome.verdict, error)
        if trouble is not None and not self._is_closing:
            self.news.append(trouble)


class Retry:
    """Begins the next round after a failed one, after longer and longer pauses."""

    def __init__(self) -> None:
        self._pause_s = PAUSE_S
        self._timer: threading.Timer | None = None

    def after_a_pause(self, begin: Callable[[], None]) -> None:
        """Call `begin` after a pause, on a thread of its own.  The next pause is longer."""
        self._timer = threading.Timer(self._pause_s, begin)
        self._timer.daemon = True
        self._timer.start()
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def shorten(self) -> None:
        """Let the next pause be the shortest: a round has not failed."""
        self._pause_s = PAUSE_S

    def cancel(self) -> None:
        """Cancel the call of a pause that is not over."""
        if self._timer is not None:
            self._timer.cancel()
