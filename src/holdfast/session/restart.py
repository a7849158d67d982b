"""A restart: the choice among what a survey has found, the reading, and the steps that are done again."""

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
from holdfast.core.checkpoint.lineage import line_from
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.peers import raise_on_all
from holdfast.core.group import Group
from holdfast.live.reading import (
    detected,
    load_from,
    shared_manifest,
    tell_exactness,
    tell_unused_records,
)
from holdfast.live.restore.candidates import STOPS, Candidate, Identity, newest_good
from holdfast.live.restore.nested import loaders_in
from holdfast.live.restore.plain import Plain, plain_values
from holdfast.live.restore.result import Found, FoundAt, Restored, RestoredFrom
from holdfast.live.restore.targets import RestoreOptions
from holdfast.live.saving.exactness import BIT_EXACT
from holdfast.live.shelves import Shelf
from holdfast.live.state.recognising import State
from holdfast.live.state.rng import Rng
from holdfast.live.tier import Reached, Tier
from holdfast.session.survey import Survey, gone

if TYPE_CHECKING:
    from holdfast.core.format.manifest import Manifest
    from holdfast.live.saving.attaching import Attached
    from holdfast.session.tiers import Tiers


@dataclass(frozen=True, slots=True)
class _Look:
    """The findings of a look, as of the state that it reached."""

    attempt: str = ""
    """The attempt of the full step."""
    plain: Plain = field(default_factory=Plain)


class Restart:
    """The choice of what the live state is restored from, and the restore.  Its methods are collective and
    block."""

    def __init__(
        self, tiers: Tiers, state: State, options: RestoreOptions, *, verify: bool = True
    ) -> None:
        """Looks at all tiers.  Nothing may be under way to them.  `verify`: compare the digests of full
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
        """Number of recorded steps that were done again to reach it."""
        self.exactness = BIT_EXACT
        self.manifest: Manifest | None = None
        """The manifest of the full step that was read."""
        self._seen = _Look()

    # -- the choice -------------------------------------------------------------------------------

    def to(self, target: int | Found | None) -> Restored:
        """Restore the newest state, a step of that number, or what `find` returned."""
        self._forget_generators()
        if isinstance(target, Found):
            return self.result(self.to_found(target))
        return self.result(self.to_newest() if target is None else self.to_step(target))

    def to_newest(self) -> int:
        """Restore what leads to the newest state, as far as it is sound; the step reached, 0 if there is
        nothing.  Warns of what is passed over."""
        return self._newest(self._attempt)

    def to_step(self, step: int) -> int:
        """Restore that step, or the nearest from which records lead to it.  NotRecoverable."""
        reached = self._step(step, self._attempt)
        if reached != step:
            raise self._unreached(step, f"the live state is that of step {reached} now")
        return reached

    def find(self, step: int | None) -> Found | None:
        """Return what `to_newest` or `to_step` would reach, as far as that can be told without reading
        tensors; None if there is nothing.  Warns of what is passed over."""
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
        """Return what to tell the user of the step that was reached."""
        if self.taken is None or self.reached is None:
            return Restored(0)
        loaders = loaders_in(self.state)
        return Restored(step, self.taken.tier, self.num_replayed, self.exactness, loaders)

    # -- the reading ------------------------------------------------------------------------------

    def _attempt(self, candidate: Candidate, until: int | None = None) -> Identity:
        """Read a step, and do the recorded steps after it again; return the state reached."""
        return self._reach(candidate, self.survey.after(candidate, until))

    def _reach(self, candidate: Candidate, states: list[Identity]) -> Identity:
        """Read a step, and do what leads to `states` again after it.  A step that is refused in its midst
        ends them as a damaged one does, but leaves a state that is of no step: all is read once more, at
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

    def from_source(self, url: str, step: int | None, only: tuple[str, ...] | None) -> Restored:
        """Begin with a step of another root, or of foreign files."""
        self._forget_generators()
        group, options = self.tiers.group, replace(self.options, only=only)
        found = load_from(url, group, self.state, step, options, verify=self.verify)
        if step is None:
            tell_unused_records(url, group, found)
        return Restored(found, "source", loaders=loaders_in(self.state))

    def _replay(self, base: Candidate, states: list[Identity]) -> Identity:
        """Do what leads to `states` after `base` again, as far as it is sound; return the state reached."""
        self.num_replayed = 0
        if states:
            trail = self.survey.trail
            self.num_replayed = trail.replay(base, states, self.state, self.options)
        return states[self.num_replayed - 1] if self.num_replayed else base.base

    # -- the look, without reading tensors ---------------------------------------------------------

    def _look(self, candidate: Candidate, until: int | None = None) -> Identity:
        """Look at a step as `_attempt` would read it: its manifest, whether its files are there and as
        long as they should be, its extras, and the records that lead on from it."""
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
        """Return what a save anew of the step that is live now adds to it, on rank 0: `make(metrics,
        files)` of those that it had.  It keeps its labels, too.  `declared`: files that such a save has
        anyway.

        Nothing is raised, for the other ranks would not know: `warn` is called with a text instead.
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
        """The step that is live now, if it was read elsewhere than in the root; None if not, or if recorded
        steps were done again after it."""
        if self.taken is None or self.num_replayed:
            return None
        return self._shelf(self.taken).noted(self.taken)

    def leave_behind(self, loaded: int) -> None:
        """Go on as a new run if this one has saved a newer step than the one that was loaded by other calls
        than `restore`: else what is saved now would sort before it.  Collective; blocks."""
        here = self.tiers.run, loaded
        if any(one.end > here for one in self.survey.candidates):
            self.tiers.leave_behind(loaded)
        own = [one for one in self.survey.root.saved if one.step == loaded]
        if own:
            manifest = shared_manifest(self.tiers.store, self.tiers.group, loaded)
            self._take_line((manifest.run, loaded), manifest)

    def take_line(self) -> None:
        """Have the run own what it has gone on from, and no step of others."""
        if self.reached is not None and self.manifest is not None:
            self._take_line(self.reached, self.manifest)

    def _take_line(self, reached: Identity, manifest: Manifest) -> None:
        there, line = self.survey.saved, manifest.line
        base = manifest.run, manifest.step
        if base[0] != reached[0]:
            line = line_from(*base, line, there)
        self.tiers.own(line_from(*reached, line, there))

    def origin(self) -> RestoredFrom:
        """Return where the state that was reached can be read once more."""
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

    @property
    def is_back(self) -> bool:
        """True if there is a newer state than the one that was reached."""
        return self.reached is not None and self.reached != self.survey.candidates[0].end

    def leaves_behind(self) -> bool:
        """True if there is anything newer than the state that was reached."""
        if self.tiers.have_moved_on():
            return True
        if not self.survey.candidates or self.reached is None:
            return False
        return self.reached != self.survey.candidates[0].end

    def summary(self) -> Reached:
        """Return what tiers are to know of it."""
        save_bytes = 0 if self.manifest is None else self.manifest.total_bytes
        return Reached(self.reached, save_bytes, self._is_complete)

    def _is_complete(self) -> bool:
        """True if no rank has state that the restore left as it was: then what was reached is all of the
        live state.  Collective."""
        return self.options.strict or not self.tiers.group.any(bool(self.options.kept))

    def unprotected(self) -> Tier | None:
        """Return the tier that was restored from if it had to rebuild part of that: one more loss is one
        too many.  None if it had not."""
        taken = self.taken
        if taken is None or not self._shelf(taken).lost_nodes(taken.attempt)[1]:
            return None
        tier: Tier = self.tiers.get(taken.tier)
        return tier

    def is_unsaved(self, *, is_recording: bool) -> bool:
        """True if what was taken may be lost with the nodes.  If `is_recording`, also if a tier lacks it
        that records come to, which lead on from it."""
        taken, root = self.taken, self.survey.root
        if taken is None:
            return False
        if self._shelf(taken).store is None:
            return taken.base not in {(s.run, s.step) for s in root.saved}
        tiers = self.tiers if is_recording else ()
        return any(tier.lacks(taken, root, num_replayed=self.num_replayed) for tier in tiers)


def origin_of(root: str, source: str | None, group: Group) -> str | None:
    """Return the URL that a run without steps begins with; rank 0 looks into the root."""
    if source is not None:
        return source
    return root if group.from_rank0(lambda: detected(root, group)) else None


def restore_generators(rng: Rng | None, restored: Restored | None) -> None:
    """Put generators once more to where the restored step had them.  UsageError if that is unknown."""
    if rng is None:
        raise UsageError(
            "restore_rng(): the state has its own 'rng', which is no holdfast.Rng",
            hint="call its load_state_dict() again, or leave the key to holdfast",
        )
    if restored is None or not restored.found:
        raise UsageError(
            "restore_rng(): nothing was restored",
            hint="call it after restore(), if Restored.found",
        )
    if rng.restored is None:
        raise UsageError(
            f"restore_rng(): the generators are fresh: step {restored} has none, or was saved by another "
            "number of ranks",
            hint="leave them as the script seeded them",
        )
    rng.load_state_dict(rng.restored)


def _passed_over(candidate: Candidate, error: HoldfastError) -> None:
    emit("restore.passed_over", step=candidate.step, error=str(error))
    warn_user(f"{candidate} cannot be used: {error}")
