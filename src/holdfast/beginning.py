"""The beginning of a run, and the saves that are refused because of it.

Of the newest run of a root the last step counts.  So a run that has not looked at what is there, or that
numbers its steps anew, would hide what came before, and nobody would see it until the next restart.  Two
things are refused, unless the user says `Checkpointer(anew=True)`:

    the root has steps, and none was restored           at the first `step` or `save`
    a step at or below the one that was restored        when it would be saved

Saving the restored step itself once more is no fault, as long as nothing has trained on.  A key of that
step which comes into the state only after the restore is given what the step has (`late`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from holdfast.errors import UsageError
from holdfast.notices import Notices
from holdfast.saving import Save
from holdfast.state.collecting import RunState
from holdfast.state.live import is_optimizer, stages
from holdfast.state.placed import memory_of
from holdfast.state.writes import write_count
from holdfast.tiers import Tiers

if TYPE_CHECKING:
    from holdfast.restore.result import Restored, RestoredFrom

ANEW = "Checkpointer(..., anew=True)"


class Beginning:
    """The decisions of a run on the steps that were there."""

    def __init__(self, tiers: Tiers, state: RunState, notices: Notices, *, anew: bool) -> None:
        self._root = tiers.store.url
        self._there = tiers.there
        self._group = tiers.group
        self._state = state
        self._notices = notices
        self._anew = anew
        self._is_decided = anew or not tiers.there
        self._origin: RestoredFrom | None = None
        """The place of the step that was restored."""
        self._least: int | None = None
        """The step that was restored, if later ones have to be above it; None if any will do."""
        self._writes = 0
        """Writes to the state until the end of the restore."""
        self._late: frozenset[str] = frozenset()
        """Keys of the restored step that no rank's state had."""
        self._was_read = False
        """True once the state could be read."""
        self._refused: UsageError | None = None

    # -- before a save ----------------------------------------------------------------------------

    def check(self, step: int) -> None:
        """UsageError if the step may not be saved."""
        self.check_decided()
        last = self._least
        if last is None or step > last or (step == last and self._num_writes() == self._writes):
            return
        why = "has been trained on since" if step == last else "is newer"
        raise UsageError(
            f"step {step} is not saved: step {last} of {self._root} was restored, and {why}; the next "
            "restart would take the one that was saved later",
            step=step,
            hint=f"count on from the restored step ({last + 1}, ...), and save an initial state only `if "
            f"not restored.found`; restore(step=...) goes back on purpose, and {ANEW} numbers anew",
        )

    def check_decided(self) -> None:
        """UsageError if the root has steps, and the user has not said what becomes of them."""
        if not self._is_decided:
            raise UsageError(
                f"{self._root} has steps of a run before ({self._there}), and none was restored: a "
                "restart would take what this run saves for the newest",
                hint="call restore() before the first step, which goes on from the newest one; or give "
                f"this run a root of its own; or say {ANEW}, to begin anew beside them: none of them is "
                "deleted",
            )

    def look_for_late(self) -> None:
        """Give keys that have come since the restore what the restored step has of them.  Collective if
        there may be any."""
        if self._late and self._origin is not None:
            from holdfast.late import give

            self._late = give(
                self._late, self._state.given, self._origin, self._group, self._notices
            )

    # -- reading the state ------------------------------------------------------------------------

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """A block in which the state is read.  A UsageError that comes there at first is the user's, for
        the state can never be saved: see `refuse`."""
        try:
            yield
        except UsageError as error:
            if not self._was_read:
                self._refused = error
            raise
        self._was_read = True

    def refuse(self, save: Save) -> None:
        """Raise what is wrong with the state that `save` has read, whatever failed saves are to do.  The
        other ranks hear of it as of any save that fails."""
        error, self._refused = self._refused, None
        if error is not None:
            save.told = True
            raise error

    # -- a restore --------------------------------------------------------------------------------

    def forget(self) -> None:
        """Begin a restore: what an earlier one has decided holds no more."""
        self._least, self._late = None, frozenset()

    def went_on(self, restored: Restored, origin: RestoredFrom, *, is_asked: bool) -> None:
        """Note what was restored, and tell of what the state lacks.  `is_asked`: the user has named an
        older step, and may number anew.  Collective."""
        self._is_decided, self._origin = True, origin
        if restored.found and not (is_asked or self._anew):
            self._least, self._writes = int(restored), self._num_writes()
        missing = self._missing(origin.keys)
        if not self._anew:
            self._late = missing
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

    def _num_writes(self) -> int:
        """Number of writes to the parameters and tensors of the state, so far as they are counted."""
        return sum(
            write_count(tensor, memory_of(tensor))
            for value in self._state.given.values()
            for tensor in _tensors(value)
            if not tensor.is_inference()
        )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    modules = stages(value)
    if modules is not None:
        for module in modules:
            yield from module.parameters()
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif is_optimizer(value):
        for group in getattr(value, "param_groups", ()):
            yield from (p for p in group["params"] if isinstance(p, torch.Tensor))
