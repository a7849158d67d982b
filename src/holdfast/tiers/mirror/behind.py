"""The home behind the root, and what one rank does there.

The rounds of `upload.py` say when, and of which step; nothing here waits for other ranks:

    each rank    copy     files of a step, part by part, each chunk proved by its digest
    rank 0       commit   the manifest, byte for byte that of the root, while the claim stands
    rank 0       tidy     what `upload_keep` lets go, and what dead runs have left
    rank 0       carry    labels and metrics of the steps that lie in both homes

All this is done on the upload thread.  The training thread gives the claim of a new run, while it
holds `committing`, and says that labels or metrics have changed; the one that tidies the root reads
`newest`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from holdfast.base.errors import FormatError, HoldfastError, NotFound
from holdfast.base.events import emit, span
from holdfast.core.checkpoint.claiming import Claim
from holdfast.core.checkpoint.committing import commit
from holdfast.core.checkpoint.files import Files
from holdfast.core.checkpoint.lineage import Owns, is_in_line
from holdfast.core.checkpoint.listing import came_later, stated_attempt
from holdfast.core.checkpoint.names import (
    AND_LOG,
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
from holdfast.live.saving.steps import RootSteps

ALL = 10**12


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
        """The step that the run went back to, until one of its own is here: its records lead on from it."""
        self.committing = threading.Lock()
        """Held while a step is committed, and by whoever takes the homes under another number."""
        self.also_tidy: Callable[[RootKeys, list[Saved], Owns], None] | None = None
        """Called on rank 0 with the steps of the run in the store, after they have been tidied up, as
        `RootSteps.also_tidy`."""
        self.newest: Saved | None = None
        """The newest step of the store, as rank 0 knows it."""
        self.notes_lag = False
        """True if labels or metrics have changed that are not behind the root."""
        self._known = Known()
        """The steps of the store."""
        self._replaced: str | None = None
        """The attempt that the step uploaded last was of before."""
        self._keep = keep

    def go_on(self, claim: Claim, base: int | None) -> None:
        """Go on as another run, which went back to step `base`.  While `committing` is held."""
        self.claim, self._base = claim, base

    def _owns(self, saved: Saved) -> bool:
        return is_in_line(saved, self.claim.run, self._steps.line)

    # -- which step -------------------------------------------------------------------------------

    def attempt_of(self, step: int) -> str | None:
        """Return the attempt that a step of the root is of now; None if it is gone, or damaged."""
        try:
            return verified_attempt(self.root, step)
        except (NotFound, FormatError):
            return None

    def left_by_others(self) -> int | None:
        """Return the newest step of the root, if it is newer than all that were uploaded, or saved
        later under the same number."""
        mine = [s for s in committed(self.root) if s.is_proved]
        theirs = [s for s in RootKeys(self.store, self._known).saved if s.is_proved]
        self.newest = last = theirs[-1] if theirs else None
        if not mine or (last is not None and mine[-1] < last):
            return None
        step = mine[-1].step
        if mine[-1] == last:
            here, there = stated_attempt(self.root, step), stated_attempt(self.store, step)
            return step if here and there and came_later(here, there) else None
        return step

    # -- copying and committing -------------------------------------------------------------------

    def copy(self, manifest: Manifest, wanted: Sequence[FileEntry], *, is_repeated: bool) -> int:
        """Copy files of a step; return the bytes copied.  `is_repeated`: a round before, which has
        failed, may have copied some."""
        files = Files(self.root, step_prefix(manifest.step), manifest, verify=True)
        # of a step of this run nothing has arrived before the first attempt
        look = manifest.run != self.claim.run or is_repeated
        return transfer_files(files, self.store, wanted, look=look, threads=1)

    def commit(self, manifest: Manifest, data: bytes) -> None:
        """Make a step exist, all the files of which have been copied.  `data`: the bytes of its
        manifest in the root."""
        with self.committing:
            self._known.begin(manifest.step)
            self._replaced = commit(self.store, manifest, self.claim, data)
            self._known.add(manifest)
            if manifest.run == self.claim.run:
                self._base = None
        self.newest = Saved(manifest.run, manifest.step)

    # -- tidying ----------------------------------------------------------------------------------

    def tidy(self, step: int) -> None:
        """Delete what is to go from the store; nothing is on its way to it now."""
        try:
            below = AND_LOG if self.also_tidy else ["steps/"]
            with (
                span("upload.tidy", step=step),
                RootKeys(self.store, self._known, below) as keys,
            ):
                discard(self.store, step, self._replaced, keys)
                self._carry(keys)
                spare = () if self._base is None else (self._base,)
                gone = prune(self.store, self._keep, spare=spare, owns=self._owns, keys=keys)
                sweep(self.store, self.claim, ALL, keys)
                if self.also_tidy is not None:
                    stay = [s for s in keys.saved if s.step not in gone and self._owns(s)]
                    self.also_tidy(keys, stay, self._owns)
        except HoldfastError as error:
            emit("tidy.failed", error=str(error))

    # -- labels and metrics -----------------------------------------------------------------------

    def carry_notes(self) -> None:
        """Carry what is noted of the root's steps, without an upload."""
        self.notes_lag = True  # also if what changed before has been carried since
        try:
            self._carry(RootKeys(self.store, self._known))
        except HoldfastError as error:  # the next upload does it again
            emit("tidy.failed", error=str(error))

    def _carry(self, keys: RootKeys) -> None:
        """Have what is noted of the root's steps behind it, too, of those that are there."""
        noted = read_notes(self.root)
        if noted != Notes():
            carry(
                noted, self.store, keys.manifests.keys() - self._others(noted, keys), replace=True
            )
            keys.known.has_notes = True
        self.notes_lag = False

    def _others(self, noted: Notes, keys: RootKeys) -> set[int]:
        """Steps behind the root that have a label, and are others than the root's of these
        numbers."""
        labelled = set(noted.live_labels.values()) & keys.manifests.keys()
        attempts = {
            s: (stated_attempt(self.root, s), stated_attempt(self.store, s)) for s in labelled
        }
        return {
            step for step, (here, there) in attempts.items() if here and there and here != there
        }
