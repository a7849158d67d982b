"""The home behind the root, and what one rank does there.

`upload.py` chooses when, and which step; nothing in this module waits for other ranks:

    each rank    copy     files of a step, part by part, each chunk verified by its digest
    rank 0       commit   the manifest, byte for byte that of the root, while the claim stands
    rank 0       tidy     steps that `upload_keep` does not keep, and what dead runs have left
    rank 0       carry    labels and metrics of the steps that lie in both homes

All this happens on the upload thread.  The training thread sets the claim of a new run, while it
holds `committing`, and notes that labels or metrics have changed.  The thread that tidies the root
reads `newest`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from holdfast.base.errors import FormatError, HoldfastError, NotFound
from holdfast.base.events import emit, span
from holdfast.core.checkpoint.claiming import Claim
from holdfast.core.checkpoint.committing import commit
from holdfast.core.checkpoint.files import Files
from holdfast.core.checkpoint.lineage import is_in_line
from holdfast.core.checkpoint.listing import came_later, stated_attempt
from holdfast.core.checkpoint.names import (
    Known,
    RootKeys,
    Saved,
    committed,
    step_prefix,
    verified_attempt,
)
from holdfast.core.checkpoint.notes import Notes, carry, read_notes
from holdfast.core.checkpoint.pruning import prune
from holdfast.core.checkpoint.tidying import Keep, discard, sweep
from holdfast.core.checkpoint.transfer import transfer_files
from holdfast.core.format.manifest import FileEntry, Manifest
from holdfast.core.store import Store
from holdfast.live.saving.steps import Follower, RootSteps

ALL = 10**12
"""A number above all attempts of a run: none is on its way when the store is swept."""


class HomeBehind:
    """The store behind a root."""

    def __init__(self, steps: RootSteps, store: Store, claim: Claim, keep: Keep) -> None:
        """`steps`: those of the root.  `keep`: the steps that stay in the store."""
        self.root = steps.store
        self._steps = steps
        self.store = store
        self.claim = claim
        """This run's claim, on both homes."""
        self._base: int | None = None
        """The step that the run went back to, from which its records lead on; None once the store has
        one of the run's own steps."""
        self.committing = threading.Lock()
        """Held while a step is committed, and while the homes are claimed under another number."""
        self.log: Follower | None = None
        """Tidies up the records in the store, if the run makes records."""
        self.newest: Saved | None = None
        """The newest step of the store, as rank 0 knows it."""
        self.notes_lag = False
        """True if changes of labels or metrics are not behind the root yet."""
        self._known = Known()
        """The steps of the store."""
        self._replaced: str | None = None
        """The attempt that the last upload replaced; None if it replaced none."""
        self._keep = keep

    def go_on(self, claim: Claim, base: int | None) -> None:
        """Go on as another run, which went back to step `base`.  The caller holds `committing`."""
        self.claim, self._base = claim, base

    def _owns(self, saved: Saved) -> bool:
        return is_in_line(saved, self.claim.run, self._steps.line)

    # -- which step -------------------------------------------------------------------------------

    def attempt_of(self, step: int) -> str | None:
        """Return the attempt of a step in the root now; None if the step is gone or damaged."""
        try:
            return verified_attempt(self.root, step)
        except (NotFound, FormatError):
            return None

    def left_by_earlier_runs(self) -> int | None:
        """Return the newest step of the root, if it is newer than all that were uploaded, or saved
        later under the same number; else None."""
        in_root = [s for s in committed(self.root) if s.is_proved]
        uploaded = [s for s in RootKeys(self.store, self._known).saved if s.is_proved]
        self.newest = last = uploaded[-1] if uploaded else None
        if not in_root or (last is not None and in_root[-1] < last):
            return None
        step = in_root[-1].step
        if in_root[-1] == last:
            here, there = stated_attempt(self.root, step), stated_attempt(self.store, step)
            return step if here and there and came_later(here, there) else None
        return step

    # -- copying and committing -------------------------------------------------------------------

    def copy(self, manifest: Manifest, wanted: Sequence[FileEntry], *, is_repeated: bool) -> int:
        """Copy files of a step; return the bytes copied.  `is_repeated`: a failed round may have
        copied some of them before."""
        files = Files(self.root, step_prefix(manifest.step), manifest, verify=True)
        # no file of a step of this run has arrived before its first round
        look = manifest.run != self.claim.run or is_repeated
        return transfer_files(files, self.store, wanted, look=look, threads=1)

    def commit(self, manifest: Manifest, data: bytes) -> None:
        """Commit a step of which all files have been copied.  `data`: the bytes of its manifest in
        the root."""
        with self.committing:
            self._known.begin(manifest.step)
            self._replaced = commit(self.store, manifest, self.claim, data)
            self._known.add(manifest)
            if manifest.run == self.claim.run:
                self._base = None
        self.newest = Saved(manifest.run, manifest.step)

    # -- tidying ----------------------------------------------------------------------------------

    def tidy(self, step: int) -> None:
        """Delete what need not stay in the store.  No upload may be on its way."""
        try:
            below = [*(() if self.log is None else self.log.below), "steps/"]
            with (
                span("upload.tidy", step=step),
                RootKeys(self.store, self._known, below) as keys,
            ):
                discard(self.store, step, self._replaced, keys)
                self._carry(keys)
                spare = () if self._base is None else (self._base,)
                gone = prune(self.store, self._keep, spare=spare, owns=self._owns, keys=keys)
                sweep(self.store, self.claim, ALL, keys)
                if self.log is not None:
                    stay = [s for s in keys.saved if s.step not in gone and self._owns(s)]
                    self.log.mark(keys, stay, self._owns)
        except HoldfastError as error:
            emit("tidy.failed", error=str(error))

    # -- labels and metrics -----------------------------------------------------------------------

    def carry_notes(self) -> None:
        """Carry labels and metrics of the root's steps, without an upload."""
        self.notes_lag = True  # even if earlier changes have been carried
        try:
            self._carry(RootKeys(self.store, self._known))
        except HoldfastError as error:  # the next upload tries it again
            emit("tidy.failed", error=str(error))

    def _carry(self, keys: RootKeys) -> None:
        """Write labels and metrics of the root's steps to the store, for the steps that it has."""
        noted = read_notes(self.root)
        if noted != Notes():
            steps = keys.manifests.keys() - self._labelled_others(noted, keys)
            carry(noted, self.store, steps, replace=True)
            keys.known.has_notes = True
        self.notes_lag = False

    def _labelled_others(self, noted: Notes, keys: RootKeys) -> set[int]:
        """Steps that have a label in the root, and are of another attempt in the store."""
        labelled = set(noted.live_labels.values()) & keys.manifests.keys()
        attempts = {
            s: (stated_attempt(self.root, s), stated_attempt(self.store, s)) for s in labelled
        }
        return {
            step for step, (here, there) in attempts.items() if here and there and here != there
        }
