"""The records that a restart finds, as a trail: the states that lead on from full steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.base.errors import PASSED_OVER, HoldfastError, warn_user
from holdfast.base.events import emit
from holdfast.core.checkpoint.peers import raise_on_all
from holdfast.core.group import Group
from holdfast.core.store import Store
from holdfast.core.store.views import JoinedStore
from holdfast.live.restore.candidates import Candidate, Identity
from holdfast.live.restore.plain import Plain, plain_values
from holdfast.live.restore.targets import RestoreOptions
from holdfast.live.shelves import Shelf, Trail, Unsound
from holdfast.live.state.recognising import State
from holdfast.tiers.records.finding import checkpoint_of, num_there
from holdfast.tiers.records.log import Log, RecordedStep
from holdfast.tiers.records.replay import survey

if TYPE_CHECKING:
    from holdfast.tiers.records.tier import DeltaTier


class RecordTrail(Trail):
    """The records of a root, and of the home behind it.  Methods that warn do so for all ranks."""

    def __init__(self, tier: DeltaTier, shelves: Sequence[Shelf], store: Store, run: int) -> None:
        """Read the headers of records that lead on from steps of any shelf, once the writers of runs before
        `run` have ended.  Collective; Deadline."""
        self._tier = tier
        self._group: Group = tier.group
        self._root = store
        homes = [s for s in shelves if s.log is not None]
        behind = [s for s in homes if s.place]
        self._behind = behind[0] if behind else None
        own = {key for s in homes if not s.place for key in s.log or ()}
        theirs = {key for s in behind for key in s.log or ()}
        both = store
        if self._behind is not None and self._behind.store is not None:
            both = JoinedStore(store, self._behind.store, theirs - own)
        bases = [c for shelf in shelves for c in shelf.candidates]
        since = min((c.step for c in bases), default=0)
        newest = max((c.run for c in bases), default=0)
        self.log: Log = survey(both, self._group, since, newest, run, sorted(own | theirs))

    def _steps(self, states: Sequence[Identity]) -> list[RecordedStep]:
        return [self.log.steps[state] for state in states]

    def after(self, base: Identity) -> list[Identity]:
        return [step.identity for step in self.log.after(base)]

    def parent(self, state: Identity) -> Identity | None:
        step = self.log.steps.get(state)
        return None if step is None else step.parent

    # -- replaying --------------------------------------------------------------------------------

    def replay(
        self, base: Candidate, states: Sequence[Identity], state: State, options: RestoreOptions
    ) -> int:
        steps = self._steps(states)
        last = self._tier.replay(self.log, steps, state, options)
        num = 0 if last is None else steps.index(last) + 1
        if num and (self._behind is None or base.place != self._behind.place):
            self._warn_of_copies(steps[:num])
        return num

    def _warn_of_copies(self, steps: list[RecordedStep]) -> None:
        """Warn of files of records that should be in the root, and were read from the home behind it."""
        keys = self.log.copies(steps)
        if keys and self._behind is not None and self._group.rank == 0:
            few = ", ".join(keys[:3]) + f" and {len(keys) - 3} more" * (len(keys) > 3)
            warn_user(
                f"records in {self._root.url} are damaged or missing, and their copies in "
                f"{self._behind.place} were taken: {few}"
            )

    # -- looking without replaying ----------------------------------------------------------------

    def look(
        self, states: Sequence[Identity], state: State, options: RestoreOptions, unsound: Unsound
    ) -> tuple[int, Plain]:
        """See `Trail`.  Reads the lengths of files, and the extras of the last step."""
        group, steps = self._group, self._steps(states)
        known = (i for i, s in enumerate(steps) if (s.identity, s.plan) in unsound)
        steps = steps[: next(known, len(steps))]
        num = 0
        with raise_on_all(group, steps[0].step if steps else 0):
            num = num_there(self.log, steps, group.rank, group.size)
        steps = steps[: -group.all_max(-num)]
        while steps:
            try:
                with raise_on_all(group, steps[-1].step):
                    newest = checkpoint_of(self.log, steps[-1])
                    plain = plain_values(newest, state, group, options.on_resize)
                return len(steps), plain
            except PASSED_OVER as error:
                emit("replay.ended", step=steps[-1].step, error=str(error))
                steps = steps[:-1]
        return 0, Plain()

    def damaged(self, state: Identity, error: HoldfastError, unsound: Unsound) -> None:
        unsound[state, self.log.steps[state].plan] = error

    # -- newer records that cannot be reached -----------------------------------------------------

    def tell(self, reached: Identity | None) -> None:
        if reached is None:
            self._warn_of_baseless()
        else:
            self._warn_of_lost(reached)

    def _warn_of_baseless(self) -> None:
        """Warn if there are records, but no full step that they lead on from."""
        steps = sorted({step for _, step in self.log.steps})
        if steps:
            warn_user(
                f"steps {steps[0]} to {steps[-1]} are recorded, and the full step before them is "
                "not complete: nothing can be restored"
            )

    def _warn_of_lost(self, reached: Identity) -> None:
        """Warn of newer records that cannot be reached, because a record or a full save before them is
        missing or damaged."""
        newer = self.log.newer_steps(reached)
        if newer:
            why = f"the record of the step after {reached[1]} is missing or damaged"
            known = {reached, *self.log.steps}
            bases = {self.log.steps[one].parent for one in known if one > reached} - known
            if bases and all(step <= reached[1] for _, step in bases):
                run, step = max(bases)
                why = f"the full save of step {step} by run {run}, their base, is not there"
            warn_user(f"{why}: records up to step {newer[-1]} are there and cannot be used")
