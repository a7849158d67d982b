"""The survey that a restart begins with: full steps, snapshots, and the records that lead on from them.

A candidate is a full step in one place, with the state that records lead to from it.  Whatever is newer
than what can be restored is told: records that lead nowhere, steps whose manifests are damaged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from holdfast.base.errors import NotFound, NotRecoverable, warn_user
from holdfast.base.wire import decode_json
from holdfast.core.checkpoint.listing import came_later, stated_attempt
from holdfast.core.checkpoint.names import describe
from holdfast.core.checkpoint.recorded import last_recorded
from holdfast.core.checkpoint.unproved import tell_passed_over
from holdfast.core.format.manifest import Manifest
from holdfast.core.store import Store
from holdfast.live.reading import saved_steps
from holdfast.live.restore.candidates import Candidate, newest_first
from holdfast.live.restore.result import FoundAt

if TYPE_CHECKING:
    from holdfast.session.tiers import Tiers
    from holdfast.tiers.records.log import Log, RecordedStep
    from holdfast.tiers.records.segment import Identity


class Survey:
    """All that a live state can be restored from, with the records that lead on from it."""

    def __init__(self, tiers: Tiers) -> None:
        """Looks at all tiers.  Nothing may be under way to them.  Collective; blocks."""
        self._tiers = tiers
        known = tiers.durable.steps.known
        self.durable, self._records = saved_steps(tiers.store, tiers.group, known, records=True)
        """The steps of the root; and on rank 0 the keys of its records."""
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

    def _replaced(self, snapshots: list[Manifest]) -> set[str]:
        """The snapshots of steps that storage has a later save of, by a script that edits it, say.
        Collective."""
        tiers, saved = self._tiers, {(s.run, s.step) for s in self.durable}
        both = sorted((m.step, m.attempt) for m in snapshots if (m.run, m.step) in saved)

        def look() -> bytes:
            found = [(stated_attempt(tiers.store, step), attempt) for step, attempt in both]
            return msgspec.json.encode(
                [a for stored, a in found if stored and came_later(stored, a)]
            )

        return decode_json(tiers.group.from_rank0(look), set[str]) if both else set()

    def _with_tip(self, base: Candidate) -> Candidate:
        steps = self.after(base)
        return replace(base, tip=steps[-1].identity) if steps else base

    def home(self, candidate: Candidate) -> Store:
        """Return the store that a durable candidate lies in."""
        return self._tiers.store if self.behind is None or not candidate.home else self.behind

    def copies(self, run: int, step: int) -> list[Candidate]:
        """Return the candidates that are one full step, in the order of all."""
        return [c for c in self.candidates if (c.run, c.step) == (run, step)]

    def lost_with_nodes(self) -> tuple[str, int]:
        """The newest snapshot in memory, and how many nodes that had part of it have it no more."""
        return ("", 0) if self.snapshots is None else self.snapshots.lost_nodes()

    # -- what leads to a state --------------------------------------------------------------------

    def after(self, base: Candidate, until: int | None = None) -> list[RecordedStep]:
        """The recorded steps that lead on from a step, all or up to one of that number."""
        steps = [] if self.log is None else self.log.after((base.run, base.step))
        return [s for s in steps if until is None or s.step <= until]

    def leading(self, at: FoundAt) -> list[RecordedStep]:
        """The recorded steps that lead to a state that was found.  NotRecoverable if one is gone."""
        steps: list[RecordedStep] = []
        state, base = at.tip or (at.run, at.step), (at.run, at.step)
        while state != base:
            one = None if self.log is None else self.log.steps.get(state)
            if one is None:
                raise gone(state[1])
            steps.insert(0, one)
            state = one.parent
        return steps

    def leading_to(self, step: int) -> Candidate:
        """Find what leads to the newest state of this number by the fewest records; older ones are
        history."""
        reached: list[tuple[Identity, int, Candidate]] = []
        for c in self.candidates:
            states = [(c.run, c.step), *(s.identity for s in self.after(c))]
            reached += [(state, c.step, c) for state in states if state[1] == step]
        way = max(reached, key=lambda way: way[:2], default=None)
        if way is not None:
            return way[2]
        elsewhere = {"memory": sorted({c.step for c in self.candidates if c.in_memory})}
        if self.behind is not None:
            elsewhere[self.behind.url] = [s.step for s in self.uploaded]
        if elsewhere := {place: steps for place, steps in elsewhere.items() if steps}:
            raise NotFound(
                f"no step {step} in {' or in '.join([self._tiers.store.url, *elsewhere])}; steps there: "
                + describe([s.step for s in self.durable])
                + "".join(f"; in {where}: {describe(have)}" for where, have in elsewhere.items())
            )
        return Candidate(0, step)  # nor in storage, which says what it has

    # -- what is not restored, though it may be newer ---------------------------------------------

    def warn_of_unproved(self, taken: int) -> None:
        """Warn of steps that count as the oldest because their manifests are damaged, and may be the
        newest."""
        if self._tiers.group.rank == 0:
            tell_passed_over(self._tiers.store.url, self.durable, taken)
            if self.behind is not None:
                tell_passed_over(self.behind.url, self.uploaded, taken)

    def warn_of_baseless(self) -> None:
        """Warn if there are records, and no step was ever complete that they lead on from."""
        steps = [] if self.log is None else sorted({s.step for s in self.log.steps.values()})
        if steps:
            warn_user(
                f"steps {steps[0]} to {steps[-1]} are recorded, and the full step before them is "
                "not complete: nothing can be restored"
            )

    def warn_of_unused(self, reached: Identity) -> None:
        """Warn of records that a run with `delta=` would replay.  Collective."""
        run, step = reached
        last = self._tiers.group.from_rank0(
            lambda: str(last_recorded(self._records, run, step)).encode()
        )
        if int(last):
            warn_user(
                f"there are newer records than step {step}, up to step {int(last)}; without delta= none is "
                "used"
            )

    def warn_of_lost(self, reached: Identity) -> None:
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

    def warn_of_copies(self, steps: list[RecordedStep]) -> None:
        """Warn of files of records that ought to be in the root, and were read behind it."""
        keys = [] if self.log is None else self.log.copies(steps)
        if keys and self.behind is not None and self._tiers.group.rank == 0:
            few = ", ".join(keys[:3]) + f" and {len(keys) - 3} more" * (len(keys) > 3)
            warn_user(
                f"records in {self._tiers.store.url} are damaged or missing, and their copies in "
                f"{self.behind.url} were taken: {few}"
            )


def gone(step: int) -> NotRecoverable:
    """Return the error for a state that was found, and is not there any more."""
    return NotRecoverable(
        f"step {step}, which find() has found, is not there any more",
        step=step,
        hint="call find() again, and restore what it finds now",
    )
