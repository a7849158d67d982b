"""The steps of a root as rank 0 changes them: it commits a step, and deletes steps that are no longer kept.

Deleting runs in the background, and must not touch files that a save under way still needs.  So every
operation that may become a step of the root is registered from before it begins until it has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from holdfast.base.errors import Deadline, FormatError, HoldfastError, Unavailable, notice_text
from holdfast.base.events import emit, span
from holdfast.base.threads import Worker
from holdfast.base.wire import WireError
from holdfast.core.checkpoint.claiming import Claim
from holdfast.core.checkpoint.committing import commit
from holdfast.core.checkpoint.lineage import Lineage, Owns, is_in_line
from holdfast.core.checkpoint.names import (
    Known,
    RootKeys,
    Saved,
    parse_attempt,
    read_manifest,
)
from holdfast.core.checkpoint.reserved_space import missing_bytes
from holdfast.core.checkpoint.tidying import Keep, discard, sweep
from holdfast.core.format.manifest import Manifest
from holdfast.core.store import LocalStore, Store
from holdfast.live.saving.labels import PendingLabels
from holdfast.live.saving.operation import SaveOperation


class Follower(Protocol):
    """What a tier does, on rank 0, as the steps of a root change.  It holds no state of the training."""

    below: Sequence[str] = ()
    """The beginnings of further keys beside the steps, which `mark` sees."""

    def noted(self) -> None:
        """Note that labels or metrics of steps have changed."""
        return

    def reading(self) -> Collection[int]:
        """Return the steps that it reads now, which must not be deleted."""
        return ()

    def needed(self) -> Sequence[Saved]:
        """Return steps that lie elsewhere, and need what leads on from them here."""
        return ()

    def mark(self, keys: RootKeys, saved: list[Saved], owns: Owns) -> None:
        """Mark further keys to delete.  `saved`: the steps of this run that stay, and those `needed`;
        `owns`: recognises steps of this run."""
        return


class RootSteps:
    """The steps of a root.  Every rank has one; only rank 0's changes anything."""

    def __init__(self, store: Store, rank: int, claim: Claim | None, keep: Keep) -> None:
        self.store = store
        self.claim = claim
        """This run's claim on the root; None for a save by itself."""
        self.known = Known()
        """The steps that rank 0 has seen and committed."""
        self.followers: list[Follower] = []
        """The tiers that do something of their own when steps change."""
        self.worker = Worker("holdfast-tidy")
        self.line: Lineage = ()
        """The steps that this run went on from; steps outside of it, of other runs, are never deleted."""
        self._rank = rank
        self._keep = keep
        self.under_way: dict[int, int] = {}
        """Steps of operations under way on this rank, by the operation's number."""
        self._lock = threading.Lock()
        self.committing = threading.Lock()
        """Held while a step is committed, deleted or pinned."""
        self.news: list[str] = []
        """Warnings for the user."""
        self.was_full = False
        """True if the disk had no room for the last save."""
        self.labels = PendingLabels()
        """The labels of steps that are being saved; the notes have those of committed ones."""
        self._told: set[str] = set()
        """Topics of warnings that are given only once."""

    @property
    def is_saving(self) -> bool:
        """True if a save is under way on this rank."""
        return bool(self.under_way)

    def watch_over(self, op: SaveOperation) -> None:
        """Protect the files of the operation's step from deletion until `let_go`."""
        with self._lock:
            self.under_way[op.number] = op.step
        self.labels.begin(op.number, op.step)

    def let_go(self, op: SaveOperation, error: BaseException | None) -> None:
        """Note that the operation has ended."""
        with self._lock:
            self.under_way.pop(op.number, None)
        for label in self.labels.end(op.number, op.step):
            self.news.append(
                f"the label {label!r} does not move to step {op.step}, whose save failed or was left out"
            )

    def commit(self, op: SaveOperation, make: Callable[[], Manifest]) -> dict[int, WireError]:
        """Commit a step whose files are all written.  On rank 0; returns errors by rank, empty if
        committed.

        `make`: returns the manifest.
        """
        try:
            manifest = make()
            with self.committing:
                self.known.begin(op.step)
                before = self._labels_of(op.step)
                op.outcome.replaced = replaced = commit(self.store, manifest, self.claim)
                self.known.add(manifest)
                given = self.labels.commit(op.number, op.step)
                if self.claim and (replaced is not None or self.known.has_notes):
                    from holdfast.live.saving.noting import write_labels

                    write_labels(self, op, self.claim.run, given, before)
                if self.claim and replaced is not None:
                    self._tell_of_others(op.step, replaced, self.claim.run)
        except Exception as error:
            op.outcome.is_uncertain = isinstance(error, (Unavailable, Deadline))
            return {0: WireError.of(error, "commit")}
        return {}

    def _labels_of(self, step: int) -> list[str] | None:
        """Return the labels of a step's number now; None if unknown."""
        if not self.known.has_notes:
            return None
        from holdfast.core.checkpoint.notes import read_notes

        try:
            return read_notes(self.store).pinned.get(step, [])
        except HoldfastError:
            return None

    def _tell_of_others(self, step: int, replaced: str, run: int) -> None:
        """Give the notice, once, that a run without a lineage has replaced a step of another run."""
        of, _ = parse_attempt(replaced) or (None, 0)
        if of == run or self.line:
            return
        told = notice_text(
            "other-run",
            f"step {step} of {'another save' if of is None else f'run {of}'} is replaced by step {step} of "
            f"this run ({run}), which did not go on from it; later steps of the same numbers will be, too; "
            "to keep both, give this run a root of its own",
        )
        if told is not None:
            self.tell_once("others", told)

    def tell_once(self, what: str, text: str) -> None:
        """Warn the user, once per topic."""
        if what not in self._told:
            self._told.add(what)
            self.news.append(text)

    def discard(self, op: SaveOperation, attempt: str) -> None:
        """Delete the files of a failed attempt, if it is certainly not committed; otherwise they are swept
        after the next successful save."""
        if self._rank == 0 and not op.outcome.is_uncertain:
            try:
                discard(self.store, op.step, attempt)
            except HoldfastError as error:
                emit("discard.failed", step=op.step, error=str(error))

    def make_room(self, op: SaveOperation) -> None:
        """Delete steps that `keep` does not keep, if the disk has no room for the next save.  On rank 0;
        blocks, and the other ranks wait for its answer."""
        keeps_all = self._keep.keeps_all and not self._below
        if self._rank or self.claim is None or keeps_all or op.request.is_rehearsal:
            return
        try:
            if not self.known.save_bytes and isinstance(self.store, LocalStore):
                for newest in self._keys().saved[-1:]:
                    self.known.save_bytes = read_manifest(self.store, newest.step).total_bytes
            if self.was_full or missing_bytes(self.store, self.known.save_bytes):
                self.worker.submit(self._tidy, -1, op.step, None).result()
        except Exception as error:
            emit("tidy.failed", error=str(error))

    def tidy(self, op: SaveOperation) -> None:
        """Tidy up after a commit, in the background."""
        if self._rank == 0:
            self.worker.submit(self._tidy, op.number, op.step, op.outcome.replaced)

    def tidy_again(self, step: int) -> None:
        """Delete steps that were protected while they were read; in the background, or blocking after
        `close`."""
        if self.known.last[0] >= 0:  # a run deletes nothing before its first commit
            self._later(self._tidy, -1, step, None)

    def _later(self, work: Callable[..., object], *args: object) -> None:
        try:
            self.worker.submit(work, *args)
        except RuntimeError:  # it is shut
            work(*args)

    def tidy_log(self) -> None:
        """Tidy up the records, if there are any."""
        if self._below:
            with self._keys() as keys:
                self._mark(keys, gone=())

    def noted(self) -> None:
        """Let followers know that labels or metrics of steps have changed."""
        for follower in self.followers:
            follower.noted()

    @property
    def _below(self) -> list[str]:
        return [start for follower in self.followers for start in follower.below]

    def _keys(self) -> RootKeys:
        return RootKeys(self.store, self.known, [*self._below, "steps/"])

    def _mark(self, keys: RootKeys, gone: Collection[int]) -> None:
        """Have followers mark further keys to delete; the steps `gone` are deleted now."""
        owns = self.owns()
        stay = [s for s in keys.saved if s.step not in gone and owns(s)]
        needed = [saved for follower in self.followers for saved in follower.needed()]
        for follower in self.followers:
            follower.mark(keys, [*stay, *needed], owns)

    def _tidy(self, number: int, step: int, replaced: str | None) -> None:
        """Delete the replaced attempt, steps that `keep` does not keep, and leftovers of crashes."""
        try:
            with span("tidy", step=step):
                with self._lock:  # they may end in another order than they began
                    watched = dict(self.under_way)
                if self.claim is None:  # a save by itself
                    discard(self.store, step, replaced)
                    return
                with self._keys() as keys:
                    discard(self.store, step, replaced, keys)
                    gone = self._prune(keys, tuple(watched.values()))
                    sweep(self.store, self.claim, min([number, *(n - 1 for n in watched)]), keys)
                    self._mark(keys, gone)
        except Exception as error:
            emit("tidy.failed", error=str(error))

    def owns(self) -> Owns:
        """Return the test for steps that this run may delete: its own, and those of its lineage."""
        run, line = -1 if self.claim is None else self.claim.run, self.line
        return lambda saved: is_in_line(saved, run, line)

    def _prune(self, keys: RootKeys, spare: tuple[int, ...]) -> list[int]:
        """Delete steps that `keep` does not keep.  If the labels cannot be read, warn once and delete
        nothing."""
        if self._keep.keeps_all:
            return []
        from holdfast.core.checkpoint.pruning import prune

        try:
            spare = (*spare, *(step for one in self.followers for step in one.reading()))
            owns = self.owns()
            return prune(
                self.store, self._keep, spare=spare, owns=owns, lock=self.committing, keys=keys
            )
        except FormatError as error:
            self.tell_once("damaged notes", f"no step is deleted: {error}")
            return []
