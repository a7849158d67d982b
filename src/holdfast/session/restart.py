"""A restart: the choice among the candidates of a survey, the reading, and the replay of recorded steps."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from holdfast.base.errors import (
    PASSED_OVER,
    HoldfastError,
    NotRecoverable,
    UsageError,
    warn_user,
)
from holdfast.base.events import emit, span
from holdfast.base.text import time_of
from holdfast.core.checkpoint.lineage import line_from
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.peers import raise_on_all
from holdfast.core.group import Group
from holdfast.live.restore.candidates import STOPS, Candidate, Identity, newest_good
from holdfast.live.restore.nested import loaders_in
from holdfast.live.restore.plain import Plain, plain_values
from holdfast.live.restore.result import Found, FoundAt, Restored, RestoredFrom
from holdfast.live.restore.targets import RestoreOptions
from holdfast.live.saving.exactness import BIT_EXACT
from holdfast.live.shelves import Shelf
from holdfast.live.state.recognising import State
from holdfast.live.state.rng import Rng
from holdfast.live.step_loading import (
    detected,
    load_named,
    shared_manifest,
    tell_exactness,
    tell_unused_records,
)
from holdfast.live.tier import Reached, Tier
from holdfast.session.restart_candidates import Survey, gone

if TYPE_CHECKING:
    from holdfast.core.format.manifest import Manifest
    from holdfast.live.saving.attaching import Attached
    from holdfast.session.tiers import Tiers


@dataclass(frozen=True, slots=True)
class _Look:
    """The result of `Restart._look` at a state."""

    attempt: str = ""
    """The attempt of the full step."""
    plain: Plain = field(default_factory=Plain)


class Restart:
    """Chooses the step to restore, and restores it.  All methods are collective and block."""

    def __init__(
        self, tiers: Tiers, state: State, options: RestoreOptions, *, verify: bool = True
    ) -> None:
        """Surveys all tiers, into which no save may be under way.  `verify`: compare the digests of full
        steps."""
        self.verify = verify
        self.tiers = tiers
        self.state = state
        self.options = options
        self.survey = Survey(tiers)
        self.taken: Candidate | None = None
        self.reached: Identity | None = None
        """The state that is live now."""
        self.num_replayed = 0
        """Number of recorded steps that were replayed to reach it."""
        self.exactness = BIT_EXACT
        self.manifest: Manifest | None = None
        """The manifest of the full step that was read."""
        self._seen = _Look()

    # -- the choice -------------------------------------------------------------------------------

    def to(self, target: int | str | Found | None) -> Restored:
        """Restore the newest state, a step of that number or label, or what `find` returned."""
        self._forget_generators()
        if isinstance(target, Found):
            return self.result(self.to_found(target))
        step = self.survey.number_of(target)
        return self.result(self.to_newest() if step is None else self.to_step(step))

    def to_newest(self) -> int:
        """Restore the newest sound state; return its step, 0 if there is none.  Warns of candidates that
        are passed over."""
        return self._newest(self._attempt)

    def to_step(self, step: int) -> int:
        """Restore that step, by records from an earlier one if need be.  NotRecoverable."""
        reached = self._step(step, self._attempt)
        if reached != step:
            raise self._unreached(step, f"the live state is now that of step {reached}")
        return reached

    def find(self, named: int | str | None) -> Found | None:
        """Return the state that `to_newest` or `to_step` would reach, without reading tensors; None if
        there is none.  Warns of candidates that are passed over."""
        step = self.survey.number_of(named)
        reached = self._newest(self._look) if step is None else self._step(step, self._look)
        if step is not None and reached != step:
            raise self._unreached(step, f"the records lead to step {reached}: find({reached})")
        taken = self.taken
        if taken is None or self.reached is None:
            return None
        tip = None if self.reached == taken.base else self.reached
        at = FoundAt(self.tiers.store.url, taken.run, taken.step, self._seen.attempt, tip)
        plain = self._seen.plain
        return Found(reached, taken.tier, plain.values, plain.undecided, self.num_replayed, at)

    def to_found(self, found: Found) -> int:
        """Restore exactly that state, from whichever tier has it.  NotRecoverable."""
        at = found.at
        if at.root != self.tiers.store.url:
            raise UsageError(
                f"step {found.step} was found in {at.root}, and this run is in {self.tiers.store.url}",
                hint="hand over what find() of this Checkpointer returned",
            )
        states = self.survey.leading(at)
        copies = self.survey.copies(at.run, at.step)
        copies = [replace(c, attempt=at.attempt) for c in copies if c.attempt in ("", at.attempt)]
        copies.sort(key=lambda c: c.tier != found.tier)  # which keeps the order of the rest

        def attempt(candidate: Candidate) -> None:
            self._reach(candidate, states)

        def unsound(candidate: Candidate, error: HoldfastError) -> None:
            self.tiers.unsound[self._name(candidate, at.attempt)] = error
            _passed_over(candidate, error)

        again = "find() passes over it from now on: call it again"
        try:
            self.taken = newest_good(copies, attempt, unsound)
        except NotRecoverable as error:
            error.hint = again
            raise
        if self.taken is None:
            raise gone(at.step)
        if self.reached is None or self.reached[1] != found.step:
            unreached, damaged = self._unreached(found.step, again), states[self.num_replayed]
            self.survey.trail.damaged(damaged, unreached, self.tiers.unsound)
            raise unreached
        return found.step

    def _newest(self, attempt: Callable[[Candidate], object]) -> int:
        survey = self.survey
        self.taken = newest_good(survey.candidates, attempt, _passed_over)
        if self.taken is not None:
            survey.warn_of_unproved(self.taken.step)
        survey.trail.tell(self.reached)
        return 0 if self.reached is None else self.reached[1]

    def _step(self, step: int, attempt: Callable[[Candidate, int], Identity]) -> int:
        self.taken = best = self.survey.leading_to(step)
        copies = self.survey.copies(best.run, best.step)
        copies = [c for c in copies if c.place and self._shelf(c).store is not None]
        if copies and best not in copies:
            self.taken = newest_good([best, *copies], lambda c: attempt(c, step), _passed_over)
            return step if self.reached is None else self.reached[1]
        return attempt(best, step)[1]

    def _unreached(self, step: int, hint: str) -> NotRecoverable:
        reached = 0 if self.reached is None else self.reached[1]
        return NotRecoverable(
            f"step {step} cannot be reached: the record of the step after {reached} is damaged",
            step=step,
            hint=hint,
        )

    def result(self, step: int) -> Restored:
        """Return the result of a restore for the user."""
        if self.taken is None or self.reached is None:
            return Restored(0)
        loaders = loaders_in(self.state)
        return Restored(step, self.taken.tier, self.num_replayed, self.exactness, loaders)

    # -- the reading ------------------------------------------------------------------------------

    def _attempt(self, candidate: Candidate, until: int | None = None) -> Identity:
        """Read a step, and replay the recorded steps after it; return the state reached."""
        return self._reach(candidate, self.survey.after(candidate, until))

    def _reach(self, candidate: Candidate, states: list[Identity]) -> Identity:
        """Read a step, and replay the records that lead to `states`.  A recorded step that is refused in
        its midst ends the replay like a damaged one, but leaves a mixed state: then all is read again, at
        most twice."""
        is_again = False
        while True:
            self._load(candidate)
            try:
                self.reached = self._replay(candidate, states)
                return self.reached
            except PASSED_OVER as error:
                refused = error.step
                before = [*takewhile(lambda state: state[1] != refused, states)]
                if isinstance(error, STOPS) or len(before) == len(states):
                    raise
                emit("replay.ended", step=refused, error=str(error))
                states, is_again = [] if is_again else before, True

    def _load(self, candidate: Candidate) -> None:
        shelf = self._shelf(candidate)
        with span("restore.load", step=candidate.step, tier=candidate.tier):
            manifest = shelf.load(candidate, self.state, self.options, verify=self.verify)
        self.exactness, self.manifest = tell_exactness(manifest), manifest

    def _shelf(self, candidate: Candidate) -> Shelf:
        return self.survey.shelves[candidate.tier]

    def _forget_generators(self) -> None:
        for value in self.state.values():
            if isinstance(value, Rng):
                value.restored = None

    def from_source(
        self, source: str, named: int | str | None, only: tuple[str, ...] | None
    ) -> Restored:
        """Restore a step of another root, or foreign files."""
        self._forget_generators()
        group, options = self.tiers.group, replace(self.options, only=only)
        url, step, found = load_named(source, named, group, self.state, options, verify=self.verify)
        if step is None:
            tell_unused_records(url, group, found)
        return Restored(found, "source", loaders=loaders_in(self.state))

    def _replay(self, base: Candidate, states: list[Identity]) -> Identity:
        """Replay the records from `base` to `states` until one is damaged; return the state reached."""
        self.num_replayed = 0
        if states:
            trail = self.survey.trail
            self.num_replayed = trail.replay(base, states, self.state, self.options)
        return states[self.num_replayed - 1] if self.num_replayed else base.base

    # -- the look, without reading tensors ---------------------------------------------------------

    def _look(self, candidate: Candidate, until: int | None = None) -> Identity:
        """Check a step without reading tensors: its manifest, existence and lengths of its files, its
        extras, and the records that lead on from it."""
        shelf, group, unsound = self._shelf(candidate), self.tiers.group, self.tiers.unsound
        checkpoint = shelf.opened(candidate, verify=self.verify)
        manifest = checkpoint.manifest
        known = unsound.get(self._name(candidate, manifest.attempt))
        if known is not None:
            raise known
        with raise_on_all(group, candidate.step):
            for file in manifest.files[group.rank :: group.size]:
                shelf.check(checkpoint, file)
        rules = self.options.on_resize
        with raise_on_all(group, candidate.step):
            plain = plain_values(checkpoint, self.state, group, rules)
        if states := self.survey.after(candidate, until):
            num, newer = self.survey.trail.look(states, self.state, self.options, unsound)
            states = states[:num]
            plain.update(newer)
        self._seen, self.num_replayed = _Look(manifest.attempt, plain), len(states)
        self.reached = states[-1] if states else candidate.base
        return self.reached

    @staticmethod
    def _name(candidate: Candidate, attempt: str) -> tuple[object, ...]:
        """The key of a step in `Tiers.unsound`."""
        return candidate.tier, candidate.run, candidate.step, attempt

    # -- what follows -----------------------------------------------------------------------------

    def attached(
        self,
        make: Callable[[Any, Any], Attached | None],
        declared: Collection[str],
        warn: Callable[[str], object],
    ) -> Attached | None:
        """Return the additions to a new save of the restored step, on rank 0: `make(metrics, files)` with
        those that it had.  The step also keeps its labels.  `declared`: files that such a save has anyway.

        Errors are not raised, because the other ranks would not know; `warn` is called with a text instead.
        """
        if self.tiers.group.rank != 0:
            return None
        from holdfast.live.saving.attaching import attached_to
        from holdfast.live.saving.noting import adopt_labels

        try:
            step = self._elsewhere()
            if step is None:
                return None
            metrics, files = attached_to(step, declared, warn)
            if all(saved.step != step.manifest.step for saved in self.survey.root.saved):
                adopt_labels(self.tiers.durable.steps, step.manifest.step)
            return make(metrics or None, files or None)
        except HoldfastError as error:
            warn(f"the restored step is saved anew, and may lack labels, metrics or files: {error}")
            return None

    def _elsewhere(self) -> Checkpoint | None:
        """Return the restored step if it was read from another place than the root; None otherwise, or if
        recorded steps were replayed after it."""
        if self.taken is None or self.num_replayed:
            return None
        return self._shelf(self.taken).noted(self.taken)

    def leave_behind(self, loaded: int) -> None:
        """After a load by another call than `restore`: go on as a new run if the root has newer steps than
        `loaded`, which would otherwise sort after all later saves.  Collective; blocks."""
        here = self.tiers.run, loaded
        if any(one.end > here for one in self.survey.candidates):
            self.tiers.leave_behind(loaded)
        own = [one for one in self.survey.root.saved if one.step == loaded]
        if own:
            manifest = shared_manifest(self.tiers.store, self.tiers.group, loaded)
            self._take_line((manifest.run, loaded), manifest)

    def take_line(self) -> None:
        """Let the run delete only steps of its own and of its lineage."""
        if self.reached is not None and self.manifest is not None:
            self._take_line(self.reached, self.manifest)

    def _take_line(self, reached: Identity, manifest: Manifest) -> None:
        there, line = self.survey.saved, manifest.line
        base = manifest.run, manifest.step
        if base[0] != reached[0]:
            line = line_from(*base, line, there)
        self.tiers.durable.steps.line = line_from(*reached, line, there)

    def origin(self) -> RestoredFrom:
        """Return the place from which the restored state can be read again."""
        m, taken = self.manifest, self.taken
        reached = 0 if self.reached is None else self.reached[1]
        store = None if taken is None else self._shelf(taken).store
        if m is None or store is None or self.num_replayed:
            return RestoredFrom(reached, self._saved_keys())
        return RestoredFrom(reached, self._saved_keys(), store, m.attempt, self.options)

    def _saved_keys(self) -> frozenset[str]:
        """Return the keys of the step that was read, if it is one of this root."""
        if self.manifest is None:
            return frozenset()
        m = self.manifest
        names = (*m.by_name, *m.aliases, *m.extras, *m.per_rank)
        return frozenset(name.partition(".")[0] for name in names)

    def standing(self) -> list[tuple[str, int, float | None]]:
        """Return the tiers that hold what was restored: the name of each, the step, and the time of its
        save, if that is known."""
        taken, m = self.taken, self.manifest
        if taken is None or m is None or self.reached is None:
            return []
        copies = self.survey.copies(taken.run, taken.step)
        found = [(one.tier, taken.step, time_of(m.created)) for one in copies]
        recorders = [tier for tier in self.tiers if tier.follows_steps and self.num_replayed]
        return found + [(tier.name, self.reached[1], None) for tier in recorders]

    @property
    def is_back(self) -> bool:
        """True if there is a newer state than the one that was reached."""
        candidates = self.survey.candidates
        return bool(candidates) and self.reached not in (None, candidates[0].end)

    def leaves_behind(self) -> bool:
        """True if there is anything newer than the state that was reached."""
        return self.tiers.have_moved_on() or self.is_back

    def summary(self) -> Reached:
        """Return the facts of this restore that tiers need."""
        save_bytes = 0 if self.manifest is None else self.manifest.total_bytes
        return Reached(self.reached, save_bytes, self._is_complete)

    def _is_complete(self) -> bool:
        """True if the restore replaced all of the live state, on all ranks.  Collective."""
        return self.options.strict or not self.tiers.group.any(bool(self.options.kept))

    def unprotected(self) -> Tier | None:
        """Return the tier that was restored from if it had to rebuild a part, so that the snapshot would
        not survive another loss; else None."""
        taken = self.taken
        if taken is None or not self._shelf(taken).lost_nodes(taken.attempt)[1]:
            return None
        tier: Tier = self.tiers.get(taken.tier)
        return tier

    def is_unsaved(self, *, is_recording: bool) -> bool:
        """True if the restored step is only in the nodes' memory.  If `is_recording`, also if a tier that
        keeps records lacks the step that they lead on from."""
        taken, root = self.taken, self.survey.root
        if taken is None:
            return False
        if self._shelf(taken).store is None:
            return taken.base not in {(s.run, s.step) for s in root.saved}
        tiers = self.tiers if is_recording else ()
        return any(tier.lacks(taken, root, num_replayed=self.num_replayed) for tier in tiers)


def origin_of(root: str, source: str | None, group: Group) -> str | None:
    """Return the URL of the checkpoint that a run without steps begins with: `source`, or the root if rank
    0 detects a foreign checkpoint there; else None."""
    if source is not None:
        return source
    return root if group.from_rank0(lambda: detected(root, group)) else None


def restore_generators(rng: Rng | None, restored: Restored | None) -> None:
    """Put generators back to their state in the restored step.  UsageError if that is unknown."""
    if rng is None:
        raise UsageError(
            "restore_rng(): the state has its own 'rng', which is not a holdfast.Rng",
            hint="call its load_state_dict() again, or leave the key to holdfast",
        )
    if restored is None or not restored.found:
        raise UsageError(
            "restore_rng(): nothing was restored",
            hint="call it after restore(), if Restored.found",
        )
    if rng.restored is None:
        raise UsageError(
            f"restore_rng(): the generators are fresh: step {restored} has none, or was saved on another "
            "number of ranks",
            hint="leave them as the script seeded them",
        )
    rng.load_state_dict(rng.restored)


def _passed_over(candidate: Candidate, error: HoldfastError) -> None:
    emit("restore.passed_over", step=candidate.step, error=str(error))
    warn_user(f"{candidate} cannot be used: {error}")
