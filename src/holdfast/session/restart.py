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
from holdfast.core.checkpoint.names import read_manifest
from holdfast.core.checkpoint.notes import read_notes
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.peers import raise_on_all
from holdfast.core.group import Group
from holdfast.live.reading import (
    detected,
    load_from,
    load_step,
    manifest_of,
    tell_exactness,
    tell_unused_records,
)
from holdfast.live.restore.candidates import STOPS, Candidate, newest_good
from holdfast.live.restore.nested import loaders_in
from holdfast.live.restore.plain import Plain, plain_values
from holdfast.live.restore.result import Found, FoundAt, Restored, RestoredFrom, Tier
from holdfast.live.restore.targets import RestoreOptions
from holdfast.live.saving.exactness import EXACT
from holdfast.live.state.recognising import State
from holdfast.live.state.rng import Rng
from holdfast.session.survey import Survey, gone

if TYPE_CHECKING:
    from holdfast.core.format.manifest import Manifest
    from holdfast.live.saving.attaching import Attached
    from holdfast.session.tiers import Tiers
    from holdfast.tiers.records.log import RecordedStep
    from holdfast.tiers.records.segment import Identity


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
        self.exactness = EXACT
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
        tip = None if self.reached == (taken.run, taken.step) else self.reached
        at = FoundAt(self.tiers.store.url, taken.run, taken.step, self._seen.attempt, tip)
        plain = self._seen.plain
        return Found(reached, tier_of(taken), plain.values, plain.undecided, self.num_replayed, at)

    def to_found(self, found: Found) -> int:
        """Restore exactly that state, from whichever tier has it.  NotRecoverable."""
        at = found.at
        if at.root != self.tiers.store.url:
            raise UsageError(
                f"step {found.step} was found in {at.root}, and this run is in {self.tiers.store.url}",
                hint="hand over what find() of this Checkpointer returned",
            )
        steps = self.survey.leading(at)
        copies = self.survey.copies(at.run, at.step)
        copies = [c for c in copies if c.attempt in ("", at.attempt)]
        copies.sort(key=lambda c: tier_of(c) != found.tier)  # which keeps the order of the rest

        def attempt(candidate: Candidate) -> None:
            self._reach(candidate, steps, at.attempt)

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
            damaged = steps[self.num_replayed]
            unreached = self._unreached(found.step, again)
            self.tiers.unsound[damaged.identity, damaged.plan] = unreached
            raise unreached
        return found.step

    def _newest(self, attempt: Callable[[Candidate], object]) -> int:
        survey = self.survey
        self.taken = newest_good(survey.candidates, attempt, _passed_over)
        if self.taken is not None:
            survey.warn_of_unproved(self.taken.step)
        if self.reached is None:
            survey.warn_of_baseless()
            return 0
        survey.warn_of_lost(self.reached)
        if self.tiers.delta is None:
            survey.warn_of_unused(self.reached)
        return self.reached[1]

    def _step(self, step: int, attempt: Callable[[Candidate, int], Identity]) -> int:
        self.taken = best = self.survey.leading_to(step)
        copies = [c for c in self.survey.copies(best.run, best.step) if c.home]
        if copies and not best.home:
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
        return Restored(step, tier_of(self.taken), self.num_replayed, self.exactness, loaders)

    # -- the reading ------------------------------------------------------------------------------

    def _attempt(self, candidate: Candidate, until: int | None = None) -> Identity:
        """Read a step, and do the recorded steps after it again; return the state reached."""
        return self._reach(candidate, self.survey.after(candidate, until))

    def _reach(
        self, candidate: Candidate, steps: list[RecordedStep], attempt: str = ""
    ) -> Identity:
        """Read a step, and do `steps` again after it.  One that is refused in its midst ends them as a
        damaged one does, but leaves a state that is of no step: all is read once more, at most twice."""
        is_again = False
        while True:
            self._fetch(candidate, attempt)
            try:
                self.reached = self._replay(candidate, steps)
                return self.reached
            except PASSED_OVER as error:
                refused = error.step
                before = [*takewhile(lambda step: step.step != refused, steps)]
                if isinstance(error, STOPS) or len(before) == len(steps):
                    raise
                emit("replay.ended", step=refused, error=str(error))
                steps, is_again = [] if is_again else before, True

    def _fetch(self, candidate: Candidate, attempt: str = "") -> None:
        """Read a step.  NotFound if it is of another `attempt`."""
        tiers, snapshots = self.tiers, self.survey.snapshots
        if candidate.in_memory and snapshots is not None and tiers.memory is not None:
            with span("restore.load", step=candidate.step, tier="memory"):
                manifest = tiers.memory.load(
                    snapshots, candidate.attempt, self.state, self.options, verify=self.verify
                )
        else:
            with span("restore.load", step=candidate.step, tier=tier_of(candidate)):
                manifest = load_step(
                    self.survey.home(candidate), tiers.group, candidate.step, self.state, self.options,
                    verify=self.verify, attempt=attempt,
                )  # fmt: skip
        self.exactness, self.manifest = tell_exactness(manifest), manifest

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

    def _replay(self, base: Candidate, steps: list[RecordedStep]) -> Identity:
        """Do `steps` after `base` again, as many as are sound; return the state reached."""
        delta, log, self.num_replayed = self.tiers.delta, self.survey.log, 0
        if delta is None or log is None or not steps:
            return base.run, base.step
        last = delta.replay(log, steps, self.state, self.options)
        if last is None:
            return base.run, base.step
        self.num_replayed = steps.index(last) + 1
        if not base.home:
            self.survey.warn_of_copies(steps[: self.num_replayed])
        return last.identity

    # -- the look, without reading tensors ---------------------------------------------------------

    def _look(self, candidate: Candidate, until: int | None = None) -> Identity:
        """Look at a step as `_attempt` would read it: its manifest, whether its files are there and as
        long as they should be, its extras, and the records that lead on from it."""
        checkpoint, group = self._opened(candidate), self.tiers.group
        manifest = checkpoint.manifest
        known = self.tiers.unsound.get(self._name(candidate, manifest.attempt))
        if known is not None:
            raise known
        with raise_on_all(group, candidate.step):
            for file in manifest.files[group.rank :: group.size]:
                checkpoint.images.check_size(file)
                if candidate.in_memory:  # whose sizes the manifest says
                    checkpoint.store.open(checkpoint.images.key(file)).close()
        rules = self.options.on_resize
        with raise_on_all(group, candidate.step):
            plain = plain_values(checkpoint, self.state, group, rules)
        steps, newer = self._sound(self.survey.after(candidate, until))
        plain.update(newer)
        self._seen, self.num_replayed = _Look(manifest.attempt, plain), len(steps)
        self.reached = steps[-1].identity if steps else (candidate.run, candidate.step)
        return self.reached

    def _opened(self, candidate: Candidate) -> Checkpoint:
        """A candidate's step, opened.  Collective."""
        tiers, snapshots = self.tiers, self.survey.snapshots
        if candidate.in_memory and tiers.memory is not None and snapshots is not None:
            return tiers.memory.opened(snapshots, candidate.attempt)
        store = self.survey.home(candidate)
        manifest = manifest_of(store, tiers.group, candidate.step)
        return Checkpoint(store, manifest, verify=self.verify)

    def _sound(self, steps: list[RecordedStep]) -> tuple[list[RecordedStep], Plain]:
        """Return the first of some recorded steps: those whose records are there, as far as their lengths
        and the extras of the last tell; and the plain values of the last.  Collective."""
        log = self.survey.log
        if log is None or not steps:
            return [], Plain()
        from holdfast.tiers.records.finding import num_there, recorded

        group, unsound = self.tiers.group, self.tiers.unsound
        known = (i for i, s in enumerate(steps) if (s.identity, s.plan) in unsound)
        steps = steps[: next(known, len(steps))]
        num = 0
        with raise_on_all(group, steps[0].step if steps else 0):
            num = num_there(log, steps, group.rank, group.size)
        steps = steps[: -group.all_max(-num)]
        while steps:
            try:
                with raise_on_all(group, steps[-1].step):
                    newest = recorded(log, steps[-1])
                    plain = plain_values(newest, self.state, group, self.options.on_resize)
                return steps, plain
            except PASSED_OVER as error:
                emit("replay.ended", step=steps[-1].step, error=str(error))
                steps = steps[:-1]
        return [], Plain()

    @staticmethod
    def _name(candidate: Candidate, attempt: str) -> tuple[object, ...]:
        """The key of a step in `Tiers.unsound`."""
        return tier_of(candidate), candidate.run, candidate.step, attempt

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
            if all(saved.step != step.manifest.step for saved in self.survey.durable):
                adopt_labels(self.tiers.durable.steps, step.manifest.step)
            return make(metrics or None, files or None)
        except HoldfastError as error:
            warn(f"the restored step is saved anew, and may lack labels, metrics or files: {error}")
            return None

    def _elsewhere(self) -> Checkpoint | None:
        """The step that is live now, if it was read from memory or from the home behind the root; None if
        not, or if recorded steps were done again after it."""
        taken, snapshots = self.taken, self.survey.snapshots
        if taken is None or self.num_replayed:
            return None
        if taken.in_memory and snapshots is not None:
            return Checkpoint(self.tiers.store, snapshots.find(taken.attempt))
        store = self.survey.home(taken)
        return Checkpoint(store, read_manifest(store, taken.step)) if taken.home else None

    def leave_behind(self, loaded: int) -> None:
        """Go on as a new run if this one has saved a newer step than the one that was loaded by other calls
        than `restore`: else what is saved now would sort before it.  Collective; blocks."""
        here = self.tiers.run, loaded
        if any(one.end > here for one in self.survey.candidates):
            self.tiers.leave_behind(loaded)
        own = [one for one in self.survey.durable if one.step == loaded]
        if own:
            manifest = manifest_of(self.tiers.store, self.tiers.group, loaded)
            self._take_line((manifest.run, loaded), manifest)

    def take_line(self) -> None:
        """Have the run own what it has gone on from, and no step of others."""
        if self.reached is not None and self.manifest is not None:
            self._take_line(self.reached, self.manifest)

    def _take_line(self, reached: Identity, manifest: Manifest) -> None:
        there, line = [*self.survey.durable, *self.survey.uploaded], manifest.line
        base = manifest.run, manifest.step
        if base[0] != reached[0]:
            line = line_from(*base, line, there)
        self.tiers.own(line_from(*reached, line, there))

    def origin(self) -> RestoredFrom:
        """Return where the state that was reached can be read once more."""
        m, taken = self.manifest, self.taken
        reached = 0 if self.reached is None else self.reached[1]
        if m is None or taken is None or taken.in_memory or self.num_replayed:
            return RestoredFrom(reached, self._saved_keys())
        return RestoredFrom(
            reached, self._saved_keys(), self.survey.home(taken), m.attempt, self.options
        )

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
        delta = self.tiers.delta
        if delta is not None and self.tiers.group.any(delta.recorded):
            return True
        if not self.survey.candidates or self.reached is None:
            return False
        return self.reached != self.survey.candidates[0].end

    @property
    def save_bytes(self) -> int:
        """Bytes of the full step that was read."""
        return 0 if self.manifest is None else self.manifest.total_bytes

    def is_complete(self) -> bool:
        """True if no rank has state that the restore left as it was: then what was reached is all of the
        live state.  Collective."""
        return self.options.strict or not self.tiers.group.any(bool(self.options.kept))

    def needs_protection(self) -> bool:
        """True if part of what was taken from memory had to be rebuilt: one more loss is one too many."""
        taken, snapshots = self.taken, self.survey.snapshots
        if taken is None or not taken.in_memory or snapshots is None:
            return False
        return snapshots.lost_nodes(taken.attempt)[1] > 0

    def is_unsaved(self, *, is_recording: bool) -> bool:
        """True if what was taken is in memory only.  If `is_recording`, also if it is an older step that
        one of two homes has not: records that lead on from it come to both."""
        taken, survey = self.taken, self.survey
        if taken is None:
            return False
        at = taken.run, taken.step
        here = {(s.run, s.step) for s in survey.durable}
        if taken.in_memory or survey.behind is None or not is_recording:
            return taken.in_memory and at not in here
        there = {(s.run, s.step) for s in survey.uploaded}
        if at == max(here | there) or at in here & there:
            return False
        return self.num_replayed > 0 or at not in here or not self._is_noted(taken.step)

    def _is_noted(self, step: int) -> bool:
        """True if a step of the root has labels, metrics or files, which another save of it would not have:
        then it stays, and it is told what the home behind lacks.  Collective."""
        store, behind = self.tiers.store, self.survey.behind

        def look() -> bytes:
            notes, manifest = read_notes(store), read_manifest(store, step)
            own = manifest.metrics or manifest.attached or notes.values(manifest.run, step)
            return b"noted" if own or step in notes.pinned else b""

        is_noted = bool(self.tiers.group.from_rank0(look))
        if is_noted and behind is not None and self.tiers.group.rank == 0:
            warn_user(
                f"records lead on from step {step}, which {behind.url} has not: until the next full "
                f"save is uploaded, they are of use with {store.url} alone",
                hint="it has labels, metrics or files, so it is not saved anew",
            )
        return is_noted


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


def tier_of(candidate: Candidate) -> Tier:
    """The tier that a candidate's full step is in."""
    return "memory" if candidate.in_memory else "upload" if candidate.home else "durable"


def _passed_over(candidate: Candidate, error: HoldfastError) -> None:
    emit("restore.passed_over", step=candidate.step, error=str(error))
    warn_user(f"{candidate} cannot be used: {error}")
