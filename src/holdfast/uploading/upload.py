"""The home behind the root: what is committed in the root is copied on to a second store.

Training sees nothing of it but a line of bookkeeping at each save.  All else is done by one thread of each
rank, in rounds.  A round uploads one step:

    all ranks    which    each names the newest save that it knows to be committed; rank 0 takes the
                          newest that all of them know, and says of which attempt its files are
    each rank    copy     its own files of that step, part by part, each chunk proved by its digest
    rank 0       commit   when every rank has copied: the manifest, byte for byte that of the root
    rank 0       tidy     what `upload_keep` lets go, and what dead runs have left

Why ranks ask each other at all: what waits is not a queue.  When storage is slower than saves come, steps
are left out, and the newest is taken.  If each rank chose by itself, one would copy step 20 and another
step 30, and none would ever be whole.  For the same reason only one step is on its way, whose files are the
only ones without a manifest that may be needed.

The first round of a run takes the newest step of the root that is newer than all that were uploaded: the
run before may have died in between.

Whatever fails costs the upload, never the training.  A step that could not be uploaded is tried again, with
longer and longer pauses, until a newer one has come or the run ends.  The user hears of the first failure
of an outage, and of its end.

Invariants:

* *must*: a manifest is put behind the root only when all its files are there, and while the claim stands;
* *must*: both homes have the same bytes under one key of `steps/`;
* *should*: what is copied takes at most `PART_BYTES`, two chunks, and what a `Writer` of the store holds.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from holdfast.checkpoint.claiming import Claim
from holdfast.checkpoint.committing import commit
from holdfast.checkpoint.files import Files
from holdfast.checkpoint.listing import came_later, stated_attempt
from holdfast.checkpoint.names import (
    AND_LOG,
    Known,
    RootKeys,
    Saved,
    committed,
    manifest_key,
    step_prefix,
    verified_attempt,
)
from holdfast.checkpoint.notes import Notes, carry, read_notes
from holdfast.checkpoint.pruning import prune
from holdfast.checkpoint.tidying import Keep, discard, sweep
from holdfast.checkpoint.transfer import PART_BYTES, transfer_files
from holdfast.errors import FormatError, HoldfastError, NotFound, UsageError
from holdfast.events import emit, span
from holdfast.format.manifest import Manifest, decode
from holdfast.group import Group
from holdfast.saving import Save
from holdfast.store import Store
from holdfast.threads import Worker
from holdfast.wire import WireError, decode_msgpack

if TYPE_CHECKING:
    from holdfast.delta.options import Delta
    from holdfast.saving.steps import RootSteps
    from holdfast.uploading.records import RecordUpload

__all__ = ["PART_BYTES", "Upload"]

PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0
"""Seconds from a failed upload to the next attempt: doubled from the one up to the other."""
LAST_PAUSE_S = 1.0
"""The same while `close` waits."""
LEAST_S = 0.1
COPY_S = 6 * 3600.0
"""Seconds that rank 0 waits for another rank's part of an upload."""
NICENESS = 10
"""Priority of the thread that uploads, below that of the training: as of `nice`."""
ALL = 10**12


class Newest(msgspec.Struct, frozen=True, array_like=True):
    """The newest save that a rank knows to be committed: its number in this run, and its step.

    The one of number 0 is the newest step of the root that is newer than all that were uploaded.
    """

    number: int
    step: int = -1


class Choice(msgspec.Struct, frozen=True, array_like=True):
    """The step that all ranks upload in a round; without an attempt there is none."""

    number: int
    step: int = -1
    attempt: str = ""


class RoundOutcome(msgspec.Struct, frozen=True, array_like=True):
    """What became of a round: `uploaded`; `gone`, with the step, from the root; `given up`, as the step is
    damaged; to be tried `again`, later; `ended`, with all uploads of this run."""

    verdict: str
    error: WireError | None = None


class Upload:
    """Copies the steps of a root to another store.  All ranks call its methods in the same order."""

    def __init__(self, root: Store, store: Store, group: Group, claim: Claim, keep: Keep) -> None:
        """Begins with what the root has and the store has not."""
        self.root = root
        self.store = store
        self.group = group
        self.claim = claim
        """This run's claim, on both homes."""
        self.committing = threading.Lock()
        """Held while a step is committed, and by whoever takes the homes under another number."""
        self.news: list[str] = []
        """Messages that the user is to be told."""
        self.known = Known()
        """The steps of the store."""
        self.also_tidy: Callable[[RootKeys, list[Saved]], None] | None = None
        """Called on rank 0 with the steps of the store, after they have been tidied up."""
        self._replaced: str | None = None
        """The attempt that the step uploaded last was of before."""
        self._keep = keep
        self._rounds = 0
        self._saves = 0
        self._newest = Newest(0)
        self._answered = -1
        """Number of the newest save of which it is settled what becomes of it here."""
        self._waiting: dict[int, Save] = {}
        """Saves that are committed in the root, and not settled, by number."""
        self._lock = threading.Lock()
        self._has_ended = False
        self._is_closing = False
        self._failed_since: float | None = None
        self._failure: WireError | None = None
        self._pause_s = PAUSE_S
        self._retry: threading.Timer | None = None
        self._num_left_out = 0
        self._is_nice = False
        self._last_uploaded: Saved | None = None
        """The newest step behind the root, as rank 0 knows it."""
        self._records: RecordUpload | None = None
        self._notes_lag = False
        """True if labels or metrics have changed that are not behind the root."""
        self._worker = Worker("holdfast-upload")
        self._begin()

    # -- training thread --------------------------------------------------------------------------

    def watch(self, save: Save) -> None:
        """Upload the step of a save when it is committed, unless a newer one is by then."""
        self._saves += 1
        save.add_done_callback(partial(self._done, self._saves))

    def keep_records(
        self, steps: RootSteps, options: Delta, flush: Callable[[float], None]
    ) -> None:
        """Upload records, too.  `steps`: the steps of the root, whose log keeps what leads on from the
        newest step uploaded, unless uploads fail.  `flush`: as of `RecordUpload`."""
        from holdfast.delta.log import mark_log
        from holdfast.uploading.records import RecordUpload

        mark = partial(mark_log, max_bytes=options.bound)
        steps.also_tidy = lambda keys, saved: mark(keys, [*saved, *self._needed()])
        self.also_tidy = mark
        self._records = RecordUpload(
            self.root, self.store, self.group, options.upload_every_s, flush=flush, news=self.news
        )

    def _needed(self) -> list[Saved]:
        """The newest step behind the root: its records have to come there, too, until there is a newer
        one."""
        last = self._last_uploaded
        return [] if last is None or self._failed_since is not None else [last]

    def unheard(self) -> list[str]:
        """Return what the user would be told if the run ended now."""
        records = [] if self._records is None else self._records.left()
        return [*self.news, *self._left(), *records]

    def renew_notes(self) -> None:
        """Carry labels and metrics, which have changed, without an upload.  On rank 0."""
        self._notes_lag = True
        with suppress(RuntimeError):  # it is closed
            self._worker.submit(self._carry_now)

    def close(self, limit_s: float) -> None:
        """Wait for the newest step, at most so long.  What is not uploaded then is told."""
        self._is_closing = True
        if self._retry is not None:
            self._retry.cancel()
        self._begin()
        if self._notes_lag:
            self.renew_notes()
        until = time.monotonic() + limit_s
        with suppress(TimeoutError):
            self._worker.settle(limit_s)
        self._has_ended = True
        self._worker.shutdown()
        if self._records is not None:
            self._records.close(max(until - time.monotonic(), LEAST_S))
        self.news += self._left()

    def _left(self) -> list[str]:
        """Say what is not uploaded, on rank 0."""
        with self._lock:
            last = max(self._waiting, default=None)
            step = None if last is None else self._waiting[last].step
        if self.group.rank != 0:
            return []
        if step is None:
            return [self._lagging()] if self._notes_lag else []
        why = f": {self._failure.text}" if self._failure is not None else ", which took too long"
        return [
            f"step {step} is not uploaded to {self.store.url}{why}; it lies in {self.root.url}, and the "
            "next run with this upload= begins with it"
        ]

    def _lagging(self) -> str:
        return (
            f"labels and metrics that changed last are not in {self.store.url}; they are in "
            f"{self.root.url}, and the next upload brings them"
        )

    # -- any thread -------------------------------------------------------------------------------

    def _done(self, number: int, save: Save) -> None:
        """Note that a save has ended, and upload it if it is committed."""
        if save.error is None and not save.skipped:
            with self._lock:
                self._waiting[number] = save
                if number > self._newest.number:
                    self._newest = Newest(number, save.step)
            self._begin()

    def _begin(self) -> None:
        with suppress(RuntimeError):  # it is closed
            self._worker.submit(self._drain)

    # -- upload thread ----------------------------------------------------------------------------

    def _drain(self) -> None:
        """Upload until there is nothing newer, or something fails."""
        self._step_back()
        while self._newest.number > self._answered and not self._has_ended:
            if self._round():
                continue
            if not self._is_closing:
                self._try_again_later()
                return
            if not self._has_ended:
                time.sleep(LAST_PAUSE_S)

    def _step_back(self) -> None:
        """Give this thread less of the processor than the training has."""
        if not self._is_nice:
            self._is_nice = True
            with suppress(OSError, AttributeError):  # Linux alone has priorities of threads
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)

    def _try_again_later(self) -> None:
        if not self._has_ended:
            self._retry = threading.Timer(self._pause_s, self._begin)
            self._retry.daemon = True
            self._retry.start()
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _round(self) -> bool:
        """Upload the newest step that all ranks know of.  True if it is settled what becomes of it."""
        self._rounds += 1
        began = time.monotonic()
        choice = Choice(0)
        try:
            choice = self._choose()
            outcome = RoundOutcome("uploaded") if not choice.attempt else self._upload(choice)
        except Exception as error:  # the other ranks cannot be reached
            outcome = RoundOutcome("again", WireError.of(error))
        self._tell(choice, outcome, time.monotonic() - began)
        if outcome.verdict in ("again", "ended"):
            self._has_ended = outcome.verdict == "ended"
            return False
        self._settle(choice, outcome)
        if self.group.rank == 0 and choice.attempt:
            self._tidy(choice.step)
        return True

    def _choose(self) -> Choice:
        """Agree on the step to upload."""
        answer = self.group.ask(
            f"upload-which/{self._rounds}",
            msgspec.msgpack.encode(self._newest),
            self._decide,
            awaited="ended its save, to be uploaded",
        )
        return decode_msgpack(answer, Choice)

    def _decide(self, answers: list[bytes]) -> bytes:
        """Rank 0: the newest that all know, as it lies in the root now."""
        known = min((decode_msgpack(a, Newest) for a in answers), key=lambda k: k.number)
        step = known.step if known.number else self._left_by_others()
        attempt = None if step is None else self._attempt_of(step)
        if step is None or attempt is None:
            return msgspec.msgpack.encode(Choice(known.number))
        return msgspec.msgpack.encode(Choice(known.number, step, attempt))

    def _attempt_of(self, step: int) -> str | None:
        """The attempt that a step of the root is of now; None if it is gone, or damaged."""
        try:
            return verified_attempt(self.root, step)
        except (NotFound, FormatError):
            return None

    def _left_by_others(self) -> int | None:
        """The newest step of the root, if it is newer than all that were uploaded, or saved later under
        the same number."""
        mine = [s for s in committed(self.root) if s.is_proved]
        theirs = [s for s in RootKeys(self.store, self.known).saved if s.is_proved]
        self._last_uploaded = last = theirs[-1] if theirs else None
        if not mine or (last is not None and mine[-1] < last):
            return None
        step = mine[-1].step
        if mine[-1] == last:
            here, there = stated_attempt(self.root, step), stated_attempt(self.store, step)
            return step if here and there and came_later(here, there) else None
        return step

    def _upload(self, choice: Choice) -> RoundOutcome:
        """Copy this rank's files, and hear what rank 0 makes of all."""
        key, error, manifest, data = manifest_key(choice.step), None, None, b""
        with span("upload", step=choice.step) as fields:
            try:
                data = self.root.get(key)
                manifest = decode(data, key)
                self._check_attempt(manifest, choice)
                fields["bytes"] = self._copy(manifest)
            except Exception as failed:
                error = WireError.of(failed)
            answer = self.group.ask(
                f"upload/{self._rounds}",
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
        """Copy the files that are this rank's; of those of a run on more ranks, its share."""
        wanted = [f for f in manifest.objects if f.rank % self.group.size == self.group.rank]
        files = Files(self.root, step_prefix(manifest.step), manifest, verify=True)
        # of a step of this run nothing has arrived before the first attempt
        look = manifest.run != self.claim.run or self._failed_since is not None
        return transfer_files(files, self.store, wanted, look=look, threads=1)

    def _conclude(
        self, choice: Choice, manifest: Manifest | None, data: bytes, answers: list[bytes]
    ) -> bytes:
        """Rank 0: commit, if every rank has copied its files."""
        given = [decode_msgpack(a, WireError | None) for a in answers]
        errors = [error for error in given if error is not None]
        if not errors and manifest is not None:
            try:
                self._commit(manifest, data)
            except Exception as error:
                errors = [WireError.of(error)]
        verdict = self._verdict(choice, errors)
        return msgspec.msgpack.encode(RoundOutcome(verdict, errors[0] if errors else None))

    def _commit(self, manifest: Manifest, data: bytes) -> None:
        with self.committing:
            self.known.begin(manifest.step)
            self._replaced = commit(self.store, manifest, self.claim, data)
            self.known.add(manifest)
        self._last_uploaded = Saved(manifest.run, manifest.step)

    def _verdict(self, choice: Choice, errors: list[WireError]) -> str:
        """What becomes of a round, by what failed."""
        if not errors:
            return "uploaded"
        if self._attempt_of(choice.step) != choice.attempt:
            return "gone"
        found = [error.error() for error in errors]
        if any(isinstance(error, UsageError) for error in found):
            return "ended"
        if any(isinstance(error, FormatError) for error in found):
            return "given up"
        return "ended" if self._is_closing else "again"

    def _settle(self, choice: Choice, outcome: RoundOutcome) -> None:
        """Note that nothing more becomes of this save, and of those before it."""
        self._pause_s = PAUSE_S
        with self._lock:
            self._answered = max(self._answered, choice.number)
            settled = sorted(n for n in self._waiting if n <= choice.number)
            saves = {number: self._waiting.pop(number) for number in settled}
        for number, save in saves.items():
            if number == choice.number and outcome.verdict == "uploaded":
                save.uploaded = True
            elif number != choice.number:
                self._left_out(save.step)

    def _left_out(self, step: int) -> None:
        emit("upload.skipped", step=step)
        self._num_left_out += 1
        if self._num_left_out == 1 and self.group.rank == 0:
            self.news.append(
                f"step {step} was not uploaded to {self.store.url}: the step before was still on its way "
                "when a newer one came; it lies in the root alone; this is told once"
            )

    def _tidy(self, step: int) -> None:
        """Delete what is to go from the store; nothing is on its way to it now."""
        try:
            below = AND_LOG if self.also_tidy else ["steps/"]
            with (
                span("upload.tidy", step=step),
                RootKeys(self.store, self.known, below) as keys,
            ):
                discard(self.store, step, self._replaced, keys)
                self._carry(keys)
                gone = prune(self.store, self._keep, keys=keys)
                sweep(self.store, self.claim, ALL, keys)
                if self.also_tidy is not None:
                    self.also_tidy(keys, [s for s in keys.saved if s.step not in gone])
        except HoldfastError as error:
            emit("tidy.failed", error=str(error))

    def _carry(self, keys: RootKeys) -> None:
        """Have what is noted of the root's steps behind it, too, of those that are there."""
        noted = read_notes(self.root)
        if noted != Notes():
            carry(
                noted, self.store, keys.manifests.keys() - self._others(noted, keys), replace=True
            )
            keys.known.has_notes = True
        self._notes_lag = False

    def _others(self, noted: Notes, keys: RootKeys) -> set[int]:
        """Steps behind the root that have a label, and are others than the root's of these numbers."""
        labelled = set(noted.live_labels.values()) & keys.manifests.keys()
        attempts = {
            s: (stated_attempt(self.root, s), stated_attempt(self.store, s)) for s in labelled
        }
        return {
            step for step, (here, there) in attempts.items() if here and there and here != there
        }

    def _carry_now(self) -> None:
        self._notes_lag = True  # also if what changed before has been carried since
        try:
            self._carry(RootKeys(self.store, self.known))
        except HoldfastError as error:  # the next upload does it again
            emit("tidy.failed", error=str(error))

    # -- what is told -----------------------------------------------------------------------------

    def _tell(self, choice: Choice, outcome: RoundOutcome, took_s: float) -> None:
        """Tell of a round: by an event, and the user, on rank 0, of each outage once."""
        error, step = outcome.error, choice.step
        if error is None:
            if choice.attempt:
                emit("upload.committed", step=step, seconds=round(took_s, 3))
            self._recovered(step)
            return
        if outcome.verdict == "gone":  # a newer one has taken its place
            emit("upload.skipped", step=step)
            return
        emit("upload.failed", step=step, error=error.text)
        self._failure = error
        is_known = self._failed_since is not None and outcome.verdict == "again"
        if outcome.verdict == "again":
            self._failed_since = self._failed_since or time.monotonic()
        if self.group.rank == 0 and not is_known and not self._is_closing:
            self.news.append(self._trouble(step, outcome.verdict, error))

    def _trouble(self, step: int, verdict: str, error: WireError) -> str:
        what = f"step {step} was not uploaded to {self.store.url}"
        then = {
            "again": "it is tried again, or a newer one",
            "given up": "newer steps will be",
            "ended": "this run uploads no more",
        }[verdict]
        return f"{what}; training and saves go on, and {then}: {error.text}"

    def _recovered(self, step: int) -> None:
        if self._failed_since is not None:
            away_s = time.monotonic() - self._failed_since
            self._failed_since = self._failure = None
            if self.group.rank == 0:
                self.news.append(
                    f"uploads to {self.store.url} go on, after {away_s:.0f} s: step {step} lies there"
                )
