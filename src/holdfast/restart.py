"""A restart: what there is over all tiers, the choice, the reading, and the steps that are done again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from holdfast.checkpoint.listing import came_later, stated_attempt
from holdfast.checkpoint.names import describe, read_manifest
from holdfast.checkpoint.notes import read_notes
from holdfast.checkpoint.opened import Checkpoint
from holdfast.checkpoint.peers import alike
from holdfast.checkpoint.recorded import last_recorded
from holdfast.checkpoint.unproved import tell_passed_over
from holdfast.errors import (
    PASSED_OVER,
    HoldfastError,
    NotFound,
    NotRecoverable,
    UsageError,
    warn_user,
)
from holdfast.events import emit, span
from holdfast.format.manifest import Manifest
from holdfast.group import Group
from holdfast.restore.candidates import Candidate, newest_first, newest_good
from holdfast.restore.plain import Plain, plain_values
from holdfast.restore.reading import (
    detected,
    load_from,
    load_step,
    manifest_of,
    saved_steps,
    tell_exactness,
    tell_unused_records,
)
from holdfast.restore.result import Found, FoundAt, Restored, Tier
from holdfast.restore.targets import RestoreOptions
from holdfast.saving.exactness import EXACT
from holdfast.state.live import State
from holdfast.state.rng import Rng
from holdfast.wire import decode_json

if TYPE_CHECKING:
    from holdfast.delta.log import Log, RecordedStep
    from holdfast.delta.segment import Identity
    from holdfast.tiers import Tiers


class Restart:
    """All that the live state can be restored from.  Its methods are collective and block."""

    def __init__(
        self, tiers: Tiers, state: State, options: RestoreOptions, *, verify: bool = True
    ) -> None:
        """Looks at all tiers.  Nothing may be under way to them.  `verify`: compare the digests of full
        steps."""
        self.verify = verify
        self.tiers = tiers
        self.state = state
        self.options = options
        known = tiers.durable.steps.known
        self.durable, self._records = saved_steps(tiers.store, tiers.group, known, records=True)
        """The steps; and on rank 0 the keys of records."""
        behind = None if tiers.upload is None else tiers.upload.store
        self.behind = behind
        """The home behind the root."""
        self.uploaded, theirs = (
            ([], []) if behind is None else saved_steps(behind, tiers.group, records=True)
        )
        self.snapshots = None if tiers.memory is None else tiers.memory.survey()
        bases = [Candidate(s.run, s.step) for s in self.durable]
        if behind is not None:
            bases += [Candidate(s.run, s.step, home=behind.url) for s in self.uploaded]
        if self.snapshots is not None:
            replaced = self._replaced(self.snapshots.manifests)
            bases += [
                Candidate(m.run, m.step, m.attempt, replaced=m.attempt in replaced)
                for m in self.snapshots.manifests
            ]
        since, newest = (
            min((c.step for c in bases), default=0),
            max((c.run for c in bases), default=0),
        )
        self.log: Log | None = (
            None
            if tiers.delta is None
            else tiers.delta.survey(since, newest, self._records, behind, theirs)
        )
        """The records that may lead on from one of these steps, and those of later runs."""
        self.candidates = newest_first(self._with_tip(base) for base in bases)
        self.taken: Candidate | None = None
        self.reached: Identity | None = None
        """The state that is live now."""
        self.num_replayed = 0
        """Number of recorded steps that were done again to reach it."""
        self.exactness = EXACT
        self._attempt_found = ""
        """In a look: the attempt of the full step that was seen last, and below its plain values."""
        self._plain = Plain()
        self._of_records = Plain()

    def _replaced(self, snapshots: list[Manifest]) -> set[str]:
        """The snapshots of steps that storage has a later save of, by a script that edits it, say.
        Collective."""
        tiers, saved = self.tiers, {(s.run, s.step) for s in self.durable}
        both = sorted((m.step, m.attempt) for m in snapshots if (m.run, m.step) in saved)

        def look() -> bytes:
            found = [(stated_attempt(tiers.store, step), attempt) for step, attempt in both]
            return msgspec.json.encode(
                [a for stored, a in found if stored and came_later(stored, a)]
            )

        return decode_json(tiers.group.from_rank0(look), set[str]) if both else set()

    def _after(self, base: Candidate) -> list[RecordedStep]:
        """The recorded steps that lead on from it."""
        return [] if self.log is None else self.log.after((base.run, base.step))

    def _with_tip(self, base: Candidate) -> Candidate:
        steps = self._after(base)
        return replace(base, tip=steps[-1].identity) if steps else base

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
        at = FoundAt(self.tiers.store.url, taken.run, taken.step, self._attempt_found, tip)
        plain = self._plain
        return Found(reached, tier_of(taken), plain.values, plain.undecided, self.num_replayed, at)

    def to_found(self, found: Found) -> int:
        """Restore exactly that state, from whichever tier has it.  NotRecoverable."""
        at = found.at
        if at.root != self.tiers.store.url:
            raise UsageError(
                f"step {found.step} was found in {at.root}, and this run is in {self.tiers.store.url}",
                hint="hand over what find() of this Checkpointer returned",
            )
        steps = self._leading(at)
        copies = [c for c in self.candidates if (c.run, c.step) == (at.run, at.step)]
        copies = [c for c in copies if c.attempt in ("", at.attempt)]
        copies.sort(key=lambda c: tier_of(c) != found.tier)  # which keeps the order of the rest

        def attempt(candidate: Candidate) -> None:
            self._fetch(candidate, at.attempt)
            self.reached = self._replay(candidate, steps)

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
            raise _gone(at.step)
        if self.reached is None or self.reached[1] != found.step:
            damaged = steps[self.num_replayed]
            unreached = self._unreached(found.step, again)
            self.tiers.unsound[damaged.identity, damaged.plan] = unreached
            raise unreached
        return found.step

    def _newest(self, attempt: Callable[[Candidate], object]) -> int:
        self.taken = newest_good(self.candidates, attempt, _passed_over)
        self._warn_of_unproved()
        if self.reached is None:
            self._warn_of_baseless()
            return 0
        self._warn_of_lost(self.reached)
        if self.tiers.delta is None:
            self._warn_of_unused(self.reached)
        return self.reached[1]

    def _step(self, step: int, attempt: Callable[[Candidate, int], Identity]) -> int:
        self.taken = best = self._leading_to(step)
        copies = [c for c in self.candidates if (c.run, c.step) == (best.run, best.step) and c.home]
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

    def _leading(self, at: FoundAt) -> list[RecordedStep]:
        """The recorded steps that lead to a state that was found.  NotRecoverable if one is gone."""
        steps: list[RecordedStep] = []
        state, base = at.tip or (at.run, at.step), (at.run, at.step)
        while state != base:
            one = None if self.log is None else self.log.steps.get(state)
            if one is None:
                raise _gone(state[1])
            steps.insert(0, one)
            state = one.parent
        return steps

    def _leading_to(self, step: int) -> Candidate:
        """Find what leads to the newest state of this number by the fewest records; older ones are
        history."""
        reached: list[tuple[Identity, int, Candidate]] = []
        for c in self.candidates:
            states = [(c.run, c.step), *(s.identity for s in self._after(c))]
            reached += [(state, c.step, c) for state in states if state[1] == step]
        way = max(reached, key=lambda way: way[:2], default=None)
        if way is not None:
            return way[2]
        elsewhere = {"memory": sorted({c.step for c in self.candidates if c.in_memory})}
        if self.behind is not None:
            elsewhere[self.behind.url] = [s.step for s in self.uploaded]
        if elsewhere := {place: steps for place, steps in elsewhere.items() if steps}:
            raise NotFound(
                f"no step {step} in {' or in '.join([self.tiers.store.url, *elsewhere])}; steps there: "
                + describe([s.step for s in self.durable])
                + "".join(f"; in {where}: {describe(have)}" for where, have in elsewhere.items())
            )
        return Candidate(0, step)  # nor in storage, which says what it has

    def _warn_of_unproved(self) -> None:
        """Warn of steps that count as the oldest because their manifests are damaged, and may be the
        newest."""
        if self.taken is not None and self.tiers.group.rank == 0:
            tell_passed_over(self.tiers.store.url, self.durable, self.taken.step)
            if self.behind is not None:
                tell_passed_over(self.behind.url, self.uploaded, self.taken.step)

    def _warn_of_baseless(self) -> None:
        """Warn if there are records, and no step was ever complete that they lead on from."""
        steps = [] if self.log is None else sorted({s.step for s in self.log.steps.values()})
        if steps:
            warn_user(
                f"steps {steps[0]} to {steps[-1]} are recorded, and the full step before them is "
                "not complete: nothing can be restored"
            )

    def _warn_of_unused(self, reached: Identity) -> None:
        """Warn of records that a run with `delta=` would replay."""
        run, step = reached
        last = self.tiers.group.from_rank0(
            lambda: str(last_recorded(self._records, run, step)).encode()
        )
        if int(last):
            warn_user(
                f"there are newer records than step {step}, up to step {int(last)}; without delta= none is "
                "used"
            )

    def _warn_of_lost(self, reached: Identity) -> None:
        """Warn of records that lead nowhere: behind one that is missing or damaged, or behind a full save
        that is not complete."""
        behind = [] if self.log is None else self.log.behind(reached)
        if self.log is not None and behind:
            why = f"the record of the step after {reached[1]} is missing or damaged"
            known = {reached, *self.log.steps}
            bases = {self.log.steps[one].parent for one in known if one > reached} - known
            if bases and all(step <= reached[1] for _, step in bases):
                run, step = max(bases)
                why = f"the full save of step {step} by run {run}, from which they lead on, is not there"
            warn_user(f"{why}: records up to step {behind[-1]} are there and cannot be used")

    def result(self, step: int) -> Restored:
        """Return what to tell the user of the step that was reached."""
        if self.taken is None or self.reached is None:
            return Restored(0)
        return Restored(step, tier_of(self.taken), self.num_replayed, self.exactness)

    # -- the reading ------------------------------------------------------------------------------

    def _attempt(self, candidate: Candidate, until: int | None = None) -> Identity:
        """Read a step, and do the recorded steps after it again; return the state reached."""
        self._fetch(candidate)
        self.reached = self._replay(candidate, self._until(candidate, until))
        return self.reached

    def _fetch(self, candidate: Candidate, attempt: str = "") -> None:
        """Read a step.  NotFound if it is of another `attempt`."""
        tiers, snapshots = self.tiers, self.snapshots
        if candidate.in_memory and snapshots is not None and tiers.memory is not None:
            with span("restore.load", step=candidate.step, tier="memory"):
                manifest = tiers.memory.load(
                    snapshots, candidate.attempt, self.state, self.options, verify=self.verify
                )
            self.exactness = tell_exactness(manifest)
        else:
            behind = self.behind if candidate.home else None
            with span("restore.load", step=candidate.step, tier=tier_of(candidate)):
                self.exactness = load_step(
                    behind or tiers.store, tiers.group, candidate.step, self.state, self.options,
                    verify=self.verify, attempt=attempt,
                )  # fmt: skip

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
        return Restored(found, "source")

    # -- the look, without reading tensors ---------------------------------------------------------

    def _look(self, candidate: Candidate, until: int | None = None) -> Identity:
        """Look at a step as `_attempt` would read it: its manifest, whether its files are there and as
        long as they should be, its extras, and the records that lead on from it."""
        checkpoint, group = self._opened(candidate), self.tiers.group
        manifest = checkpoint.manifest
        known = self.tiers.unsound.get(self._name(candidate, manifest.attempt))
        if known is not None:
            raise known
        with alike(group, candidate.step):
            for file in manifest.files[group.rank :: group.size]:
                checkpoint.images.check_size(file)
                if candidate.in_memory:  # whose sizes the manifest says
                    checkpoint.store.open(checkpoint.images.key(file)).close()
        rules = self.options.on_resize
        with alike(group, candidate.step):
            self._plain = plain_values(checkpoint, self.state, group, rules)
        steps = self._sound(self._until(candidate, until))
        if steps and self.log is not None:
            self._plain.update(self._of_records)
        self._attempt_found, self.num_replayed = manifest.attempt, len(steps)
        self.reached = steps[-1].identity if steps else (candidate.run, candidate.step)
        return self.reached

    def _opened(self, candidate: Candidate) -> Checkpoint:
        """A candidate's step, opened.  Collective."""
        tiers = self.tiers
        if candidate.in_memory and tiers.memory is not None and self.snapshots is not None:
            return tiers.memory.opened(self.snapshots, candidate.attempt)
        store = tiers.store if self.behind is None or not candidate.home else self.behind
        manifest = manifest_of(store, tiers.group, candidate.step)
        return Checkpoint(store, manifest, verify=self.verify)

    def _sound(self, steps: list[RecordedStep]) -> list[RecordedStep]:
        """The first of some recorded steps: those whose records are there, as far as their lengths and the
        extras of the last tell.  Collective."""
        if self.log is None or not steps:
            return []
        from holdfast.delta.finding import num_there, recorded

        group, unsound = self.tiers.group, self.tiers.unsound
        known = (i for i, s in enumerate(steps) if (s.identity, s.plan) in unsound)
        steps = steps[: next(known, len(steps))]
        num = 0
        with alike(group, steps[0].step if steps else 0):
            num = num_there(self.log, steps, group.rank, group.size)
        steps = steps[: -group.most(-num)]
        while steps:
            try:
                with alike(group, steps[-1].step):
                    self._of_records = plain_values(
                        recorded(self.log, steps[-1]), self.state, group, self.options.on_resize
                    )
                break
            except PASSED_OVER as error:
                emit("replay.ended", step=steps[-1].step, error=str(error))
                steps = steps[:-1]
        return steps

    @staticmethod
    def _name(candidate: Candidate, attempt: str) -> tuple[object, ...]:
        """The key of a step in `Tiers.unsound`."""
        return tier_of(candidate), candidate.run, candidate.step, attempt

    def lost_with_nodes(self) -> tuple[str, int]:
        """The newest snapshot in memory, and how many nodes that had part of it have it no more."""
        return ("", 0) if self.snapshots is None else self.snapshots.lost_nodes()

    def needs_protection(self) -> bool:
        """True if part of what was taken from memory had to be rebuilt: one more loss is one too many."""
        taken = self.taken
        if taken is None or not taken.in_memory or self.snapshots is None:
            return False
        return self.snapshots.lost_nodes(taken.attempt)[1] > 0

    def _until(self, base: Candidate, until: int | None) -> list[RecordedStep]:
        """The recorded steps that lead on from a step, all or up to one of that number."""
        return [s for s in self._after(base) if until is None or s.step <= until]

    def _replay(self, base: Candidate, steps: list[RecordedStep]) -> Identity:
        """Do `steps` after `base` again, as many as are sound; return the state reached."""
        delta, self.num_replayed = self.tiers.delta, 0
        if delta is None or self.log is None or not steps:
            return base.run, base.step
        last = delta.replay(self.log, steps, self.state, self.options)
        if last is None:
            return base.run, base.step
        self.num_replayed = steps.index(last) + 1
        if not base.home:
            self._warn_of_copies(self.log.copies(steps[: self.num_replayed]))
        return last.identity

    def _warn_of_copies(self, keys: list[str]) -> None:
        """Warn of files of records that ought to be in the root, and were read behind it."""
        if keys and self.behind is not None and self.tiers.group.rank == 0:
            few = ", ".join(keys[:3]) + f" and {len(keys) - 3} more" * (len(keys) > 3)
            warn_user(
                f"records in {self.tiers.store.url} are damaged or missing, and their copies in "
                f"{self.behind.url} were taken: {few}"
            )

    # -- what follows -----------------------------------------------------------------------------

    def leaves_behind(self) -> bool:
        """True if there is anything newer than the state that was reached."""
        delta = self.tiers.delta
        if delta is not None and self.tiers.group.any(delta.recorded):
            return True
        if not self.candidates or self.reached is None:
            return False
        return self.reached != self.candidates[0].end

    def is_unsaved(self, *, is_recording: bool) -> bool:
        """True if what was taken is in memory only.  If `is_recording`, also if it is an older step that
        one of two homes has not: records that lead on from it come to both."""
        taken = self.taken
        if taken is None:
            return False
        at = taken.run, taken.step
        here = {(s.run, s.step) for s in self.durable}
        if taken.in_memory or self.behind is None or not is_recording:
            return taken.in_memory and at not in here
        there = {(s.run, s.step) for s in self.uploaded}
        if at == max(here | there) or at in here & there:
            return False
        return self.num_replayed > 0 or at not in here or not self._is_noted(taken.step)

    def _is_noted(self, step: int) -> bool:
        """True if a step of the root has labels, metrics or files, which another save of it would not have:
        then it stays, and it is told what the home behind lacks.  Collective."""
        store = self.tiers.store

        def look() -> bytes:
            notes, manifest = read_notes(store), read_manifest(store, step)
            own = manifest.metrics or manifest.attached or notes.values(manifest.run, step)
            return b"noted" if own or step in notes.pinned else b""

        is_noted = bool(self.tiers.group.from_rank0(look))
        if is_noted and self.behind is not None and self.tiers.group.rank == 0:
            warn_user(
                f"records lead on from step {step}, which {self.behind.url} has not: until the next full "
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


def _gone(step: int) -> NotRecoverable:
    return NotRecoverable(
        f"step {step}, which find() has found, is not there any more",
        step=step,
        hint="call find() again, and restore what it finds now",
    )


def _passed_over(candidate: Candidate, error: HoldfastError) -> None:
    emit("restore.passed_over", step=candidate.step, error=str(error))
    warn_user(f"{candidate} cannot be used: {error}")
