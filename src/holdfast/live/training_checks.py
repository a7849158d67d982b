"""Noticing what is wrong with a training beside its saves, and telling it once.

`Noticing` is called at each `Checkpointer.step`, which it looks at for the first ten calls after the start
and after a restore, at each save, and behind each step of any optimizer, where it may cost next to nothing:

    stale_objects   another optimizer steps than the one that is saved; nothing that is saved changes
    numbers         counters in attributes that no state_dict() has, and generators
    gradients       ones that are there at a save, and that the next step uses
    merged          adapters that are merged into weights, at a save
"""

from __future__ import annotations

from typing import Any

from holdfast.base.notices import Notices
from holdfast.base.text import listed
from holdfast.live.collecting import RunState
from holdfast.live.state.gradients import KeptGradients, PendingGradients, gradients_text
from holdfast.live.state.merged import layers_with_adapters, merged_in, merged_text
from holdfast.live.state.numbers import AttributeNumbers, cut_off
from holdfast.live.state.observer import StepCounts
from holdfast.live.state.recognising import State
from holdfast.live.state.stale_objects import StaleObjects, has_trained

FIRST_STEPS = 4
"""Steps of optimizers behind which numbers are looked at: a script may save only once."""


class Noticing:
    """Looks at the state of a run, on its training thread."""

    def __init__(self, run: RunState, notices: Notices) -> None:
        self._run, self._notices = run, notices
        self._values: list[int] = []
        """Ids of the values of the state, when what is compared was chosen."""
        self._num_stepped = self._looked_at = 0
        self._steps = self._has_stepped = False
        """True if an optimizer has stepped since the last look; and before that look."""
        self._gradients = PendingGradients()
        self._numbers = AttributeNumbers({})
        self._merging: list[tuple[str, Any]] | None = None
        self._counts = StepCounts(self._stepped)
        self._stale = StaleObjects(self._counts)
        self._count()

    @property
    def _state(self) -> State:
        return self._run.given

    # -- called ------------------------------------------------------------------------------------

    def _stepped(self, optimizer: Any) -> None:
        """An optimizer's step has ended.  Called in torch's hook."""
        self._steps = True
        if self._gradients.kept is not None:
            self._tell_if_used(self._gradients.kept, optimizer)
        if self._num_stepped < FIRST_STEPS:
            self._num_stepped += 1
            self._count()
            self._gradients.choose(self._state)
        self._gradients.stepped()

    def begin(self, step: int) -> None:
        """Begin anew with a step that was restored."""
        for key, kind in cut_off(self._state):
            self._notices.once("dead-groups", _cut_off_text(key, kind), about=key)
        self._stale.begin(step)
        self._counts.forget()
        self._values, self._num_stepped = [], 0
        self._gradients.kept = None
        self._count()

    def look(self, step: int) -> None:
        """Look at the state at a call of `step`."""
        self._roll(step)
        if self._stale.is_watching:
            self._compare(step, is_save=False)

    def saving(self, step: int) -> None:
        """Look at the state at a save."""
        if self._looked_at != step:
            self._roll(step)
        if self._gradients.are_accumulated(has_stepped=self._has_stepped):
            self._gradients.keep(step)
        self._compare(step, is_save=True)
        if self._merging is None:  # at the first save it is told when all is collected
            self._merging = [*layers_with_adapters(self._state)]
        elif names := list(merged_in(self._merging)):
            self._notices.once("merged-adapters", merged_text(names))

    def check_in_backward(self) -> None:
        """UsageError for optimizers that were seen to step in backward, and that the state lacks."""
        if stepped := self._counts.stepped_in_backward():
            from holdfast.live.state.in_hooks import check_in_backward

            check_in_backward(self._state, stepped)

    def has_trained(self) -> bool:
        """True if the state was trained since it was restored, as steps of optimizers tell."""
        return has_trained(self._state, self._counts)

    def close(self) -> None:
        """Notice nothing any more."""
        self._counts.close()

    def _tell_if_used(self, kept: KeptGradients, optimizer: Any) -> None:
        """Tell of gradients that were there at a save, once a step has used them."""
        used = kept.are_used_by(optimizer)
        if used:
            self._notices.once("gradients", gradients_text(kept.step))
        if used is not None:
            self._gradients.kept = None

    # -- comparing ---------------------------------------------------------------------------------

    def _roll(self, step: int) -> None:
        """Note that the script has come to another call."""
        self._looked_at = step
        self._has_stepped, self._steps = self._steps, False
        if self._counts.has_compiled:  # no hook has seen behind such a step
            self._gradients.stepped()
        self._gradients.look()

    def _compare(self, step: int, *, is_save: bool) -> None:
        self._count()
        found = self._stale.look(self._state, step, self._run.num_tensors, is_save=is_save)
        for notice, text, about in found:
            self._notices.once(notice, text, about=about)
        numbers = self._numbers.counted(self._state)
        if is_save:
            changed = self._numbers.changed_tensors()
            numbers += [name for name, is_number in changed if is_number]
            if tensors := [name for name, is_number in changed if not is_number]:
                self._notices.once("tensors-outside", _tensors_text(tensors))
            if drawn := self._numbers.generators.drawn(self._state):
                self._notices.once("generators-outside", _generators_text(drawn))
        if numbers:
            self._notices.once("numbers-outside", _numbers_text(numbers))

    def _count(self) -> None:
        """Look at numbers; those of a state that has other values than before are new."""
        values = [id(value) for value in self._state.values()]
        if values == self._values:
            self._numbers.observe()
        else:
            self._values, self._merging = values, None
            self._numbers = AttributeNumbers(self._state)
            self._gradients.choose(self._state)


def _cut_off_text(key: str, kind: str) -> str:
    return (
        f"{key}: the param_groups of this {kind} are not those of the optimizer inside any more, which has "
        "loaded others: what a scheduler sets there has no effect; make param_groups a property that "
        "returns those of the optimizer inside"
    )


def _numbers_text(names: list[str]) -> str:
    return (
        f"{listed(names)} changes while the training goes on and is in no state_dict(): a restart has the "
        "number of a fresh build; keep it in a buffer, in get_extra_state() or in the state"
    )


def _generators_text(names: list[str]) -> str:
    return (
        f"{listed(names)} draws while the training goes on, and no state_dict() has its state: a restart "
        "has that of a fresh build; keep it in get_extra_state(), in a state_dict() or in the state"
    )


def _tensors_text(names: list[str]) -> str:
    return (
        f"{listed(names)}: tensors in attributes change and are in no state_dict(): a restart goes on with "
        "those of a fresh build; keep them in optimizer.state[p], or hand them over as a value of the state"
    )
