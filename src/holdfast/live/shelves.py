"""What a restart finds: shelves of full steps, one for each tier that has any, and a trail behind them.

    Shelf    full steps in one place: the root, the home behind it, the memory of the nodes
    Trail    states that lead on from full steps, one after the other: records

A restart lists all shelves, asks the trail how far it leads from each step, chooses (`candidates`), and has
the shelf load the step and the trail do the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from holdfast.base.errors import HoldfastError
from holdfast.core.checkpoint.names import Known, Saved, read_manifest
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.format.manifest import FileEntry, Manifest
from holdfast.core.group import Group
from holdfast.core.store import Store
from holdfast.live.restore.candidates import Candidate, Identity
from holdfast.live.restore.plain import Plain
from holdfast.live.restore.targets import RestoreOptions
from holdfast.live.state.recognising import State
from holdfast.live.step_loading import load_step, saved_steps, shared_manifest

Unsound = dict[tuple[object, ...], HoldfastError]
"""Why steps and records that `find` found could not be restored, by a name for each."""


class Shelf(Protocol):
    """The full steps that a tier holds, as of a look.  Collective, but for what says otherwise."""

    tier: str
    """Name of the tier."""
    place: str
    """Name in messages; empty for the root."""
    candidates: list[Candidate]
    saved: list[Saved]
    """Its steps with the runs that saved them, if they lie in storage."""
    store: Store | None
    """The store in which its steps can be read once more; None if they may be lost with the nodes."""
    log: Collection[str] | None
    """On rank 0: the keys of the records that lie beside its steps; None if none ever do."""

    def load(
        self, candidate: Candidate, state: State, options: RestoreOptions, *, verify: bool
    ) -> Manifest:
        """Read a step into the live state.  NotFound if it is of another attempt than the candidate, where
        that names one."""

    def opened(self, candidate: Candidate, *, verify: bool) -> Checkpoint:
        """Return a step of which nothing is read yet."""

    def check(self, checkpoint: Checkpoint, file: FileEntry) -> None:
        """HoldfastError unless a file of an opened step is there, as long as it should be.  Not
        collective."""

    def noted(self, candidate: Candidate) -> Checkpoint | None:
        """Return the step, for its metrics and files; None if these are in the root.  Not collective."""

    def lost_nodes(self, attempt: str = "") -> tuple[str, int]:
        """Return a snapshot (else the newest), and how many nodes that had part of it have it no more."""


class StoredShelf:
    """The steps of a store."""

    def __init__(
        self,
        store: Store,
        group: Group,
        *,
        tier: str,
        is_root: bool = False,
        known: Known | None = None,
        records: bool = False,
    ) -> None:
        """Lists the store.  Collective.  `known`: what rank 0 knows of its steps; `records`: list the log,
        too."""
        self.store: Store | None = store
        self.tier = tier
        self.place = "" if is_root else store.url
        self._at = store
        self._group = group
        self.saved, keys = saved_steps(store, group, known, records=records)
        self.log: Collection[str] | None = keys if records else None
        self.candidates = [
            Candidate(s.run, s.step, tier=tier, place=self.place) for s in self.saved
        ]

    def load(
        self, candidate: Candidate, state: State, options: RestoreOptions, *, verify: bool
    ) -> Manifest:
        """See `load_step`."""
        step, attempt = candidate.step, candidate.attempt
        return load_step(
            self._at, self._group, step, state, options, verify=verify, attempt=attempt
        )

    def opened(self, candidate: Candidate, *, verify: bool) -> Checkpoint:
        manifest = shared_manifest(self._at, self._group, candidate.step)
        return Checkpoint(self._at, manifest, verify=verify)

    def check(self, checkpoint: Checkpoint, file: FileEntry) -> None:
        checkpoint.images.check_size(file)

    def noted(self, candidate: Candidate) -> Checkpoint | None:
        if not self.place:
            return None
        return Checkpoint(self._at, read_manifest(self._at, candidate.step))

    def lost_nodes(self, attempt: str = "") -> tuple[str, int]:
        return "", 0


class Trail(Protocol):
    """The states that lead on from full steps.  A state is named by its run and step."""

    def after(self, base: Identity) -> list[Identity]:
        """Return the states that lead on from one, in order."""
        return []

    def parent(self, state: Identity) -> Identity | None:
        """Return the state that one leads on from; None if there is no such state."""
        return None

    def replay(
        self, base: Candidate, states: Sequence[Identity], state: State, options: RestoreOptions
    ) -> int:
        """Do states again that lead on from a step which is live; return how many were sound.  Collective.
        An error that names a step was noticed amid that step, and leaves a state that is of none."""
        return 0

    def look(
        self, states: Sequence[Identity], state: State, options: RestoreOptions, unsound: Unsound
    ) -> tuple[int, Plain]:
        """Return how many of some states could be done again, as far as that can be told without doing it,
        and the plain values of the last.  Collective."""
        return 0, Plain()

    def damaged(self, state: Identity, error: HoldfastError, unsound: Unsound) -> None:
        """Note that a state could not be reached: `look` ends before it from now on."""
        return

    def tell(self, reached: Identity | None) -> None:
        """Warn of what is newer than the state that was reached and leads nowhere.  Collective.  None: no
        full step could be reached."""
        return
