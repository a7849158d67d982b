"""The beginning of a run, and the saves that are refused because of it.

A restart takes the last step of the newest run.  So a run that does not restore, or that numbers its steps
anew, would hide the steps before it, which would only show at the next restart.  Two things are refused,
unless the user says `Checkpointer(anew=True)`:

    the root or memory has steps, none was restored     at the first `step` or `save`
    a step at or below the one that was restored        when it would be saved

The restored step itself may be saved again until an optimizer has stepped: weights that are averaged for an
evaluation and put back, or a metric that changes, are no training.  A module that is added to the state
after the restore is loaded from the restored step (`added_state`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.base.errors import UsageError
from holdfast.base.notices import Notices
from holdfast.live.collecting import RunState
from holdfast.live.saving import Save
from holdfast.live.state.recognising import State, stages
from holdfast.live.training_checks import Noticing
from holdfast.session.tiers import Tiers

if TYPE_CHECKING:
    from holdfast.live.restore.result import Restored, RestoredFrom


ANEW = "Checkpointer(..., anew=True)"

SAVES = 10
"""Saves after a restore, and after the last late key, at which ranks ask each other for late keys."""


class Beginning:
    """What a run may save, given the steps that were there when it began."""

    def __init__(self, tiers: Tiers, state: RunState, notices: Notices, *, anew: bool) -> None:
        self._root = tiers.store.url
        self._there = tiers.there
        self._group = tiers.group
        self._state = state
        self._notices = notices
        self._anew = anew
        self._is_decided = anew or not tiers.there
        self._unasked = [*tiers] if self._is_decided and not anew else []
        """Tiers that may hold steps of an earlier run although the root has none."""
        self._origin: RestoredFrom | None = None
        """The place of the step that was restored."""
        self._least: int | None = None
        """The restored step, if later ones must be above it; None if any number is allowed."""
        self._late: frozenset[str] = frozenset()
        """Keys of the restored step that no rank's state had; empty once late keys are no longer looked
        for."""
        self._taken: Taken | None = None
        """The modules that have taken restored values, until the next save."""
        self._saves_left = 0
        """Saves at which late keys are still looked for."""
        self._was_read = False
        """True once the state could be read."""
        self._refused: UsageError | None = None

    # -- before a save ----------------------------------------------------------------------------

    def check(self, step: int, noticing: Noticing) -> None:
        """UsageError if the step may not be saved.  Collective where the step is the restored one."""
        self.check_decided()
        last = self._least
        if last is None or step > last:
            return
        if step == last and not self._group.any(noticing.has_trained()):
            return
        why = "has been trained on since" if step == last else "is newer"
        raise UsageError(
            f"step {step} is not saved: step {last} of {self._root} was restored, and {why}; the next "
            "restart would take the one that was saved later",
            step=step,
            hint=f"continue from the restored step ({last + 1}, ...), and save an initial state only `if "
            f"not restored.found`; restore(step=...) goes back on purpose, and {ANEW} numbers anew",
        )

    def check_decided(self) -> None:
        """UsageError if the root or memory has steps, and the user has neither restored nor said `anew`.
        The first call is collective."""
        unasked, self._unasked = self._unasked, []
        if found := [there for tier in unasked if (there := tier.there())]:
            self._is_decided, self._there = False, found[0]
        if not self._is_decided:
            raise UsageError(
                f"{self._root} has steps of an earlier run ({self._there}), and none was restored: a "
                "restart would take the steps of this run for the newest",
                hint="call restore() before the first step, to go on from the newest one; or give this "
                f"run a root of its own; or say {ANEW}, to begin anew beside them: only steps of the same "
                "number are replaced; after holdfast.load(...) say anew=True, or use ckpt.restore() in its "
                "place",
            )

    def look_for_late(self, *, is_save: bool = True) -> None:
        """Load keys that were added after the restore from the restored step.  Collective while such keys
        may come, for a few saves."""
        if is_save and self._taken is not None and self._origin is not None:
            self._taken.tell_exchanged(self._state.given, self._origin.step, self._notices)
            self._taken = None
        if self._late and self._origin is not None:
            from holdfast.session.added_state import give

            late = give(self._late, self._state.given, self._origin, self._group, self._notices)
            self._saves_left = SAVES if late != self._late else self._saves_left - is_save
            self._late = late if self._saves_left else frozenset()

    # -- reading the state ------------------------------------------------------------------------

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """A block in which the state is read.  A UsageError of the first such block is raised to the user,
        because the state can never be saved: see `refuse`."""
        try:
            yield
        except UsageError as error:
            if not self._was_read:
                self._refused = error
            raise
        self._was_read = True

    def refuse(self, save: Save) -> None:
        """Raise the error of the state that `save` has read, whatever `on_error` says.  The other ranks
        learn of it as of any failed save."""
        error, self._refused = self._refused, None
        if error is not None:
            save.told = True
            if error.step is None:
                error.step = save.step  # as the worker does, be it sooner or later
            raise error

    # -- a restore --------------------------------------------------------------------------------

    def forget(self) -> None:
        """Begin a restore: forget the decisions of an earlier one."""
        self._least, self._late, self._taken = None, frozenset(), None

    def went_on(self, restored: Restored, origin: RestoredFrom, *, is_asked: bool) -> None:
        """Note what was restored, and warn of keys that the state lacks.  `is_asked`: the user has named an
        older step, and may number anew.  Collective."""
        self._is_decided, self._unasked, self._origin = True, [], origin
        if restored.found and not (is_asked or self._anew):
            self._least = int(restored)
        missing = self._missing(origin.keys)
        if not self._anew:
            self._late, self._saves_left = missing, SAVES
        if restored.found and not self._anew:
            self._taken = Taken(self._state.given)
        for key in sorted(missing) if self._group.rank == 0 else ():
            self._notices.once(
                "untaken-key",
                f"step {restored} has {key!r}, and the state lacks it: it was not restored, and the next "
                "saves will not have it; if it is needed, put it into the state before restore()",
                about=key,
            )
        self._notices.tell()

    def _missing(self, keys: frozenset[str]) -> frozenset[str]:
        """Return those of some keys that no rank's state has.  Collective."""
        own = self._state.everything().keys()
        if not self._group.any(not keys <= own):
            return frozenset()
        theirs = self._group.all_gather("\n".join(own).encode())
        return keys.difference(*(known.decode().split("\n") for known in theirs))


class Taken:
    """The modules that were restored, by their parameters.

        ckpt.restore()
        average = ckpt.state["average"] = AveragedModel(model)      begins anew, and the next save has it

    A wrapper has the parameters of the module inside, so it is not fresh.  Plain values and containers are
    as the script wants them: it has just set them.
    """

    def __init__(self, state: State) -> None:
        self._params = {
            key: {id(p): weakref.ref(p) for module in modules for p in module.parameters()}
            for key, value in state.items()
            if (modules := stages(value)) is not None
        }

    def tell_exchanged(self, state: State, step: int, notices: Notices) -> None:
        """Tell of each module that was restored from `step` and then replaced by a fresh one."""
        for key, before in self._params.items():
            own = [p for module in stages(state.get(key)) or () for p in module.parameters()]
            if own and before and not any(id(p) in before and before[id(p)]() is p for p in own):
                notices.once(
                    "exchanged",
                    f"{key!r} was restored from step {step}, and the state has a fresh module in its "
                    "place, which the next saves have: put it into the state before restore()",
                    about=key,
                )
