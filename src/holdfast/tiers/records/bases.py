"""The full saves that records lead on from, and the steps that are lost between records and full saves."""

from __future__ import annotations

from holdfast.core.group import Group
from holdfast.live.saving import Save
from holdfast.tiers.records.segment import Identity


class Bases:
    """The full saves that records begin with: when all ranks make one, and whether it went well."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._save: Save | None = None
        self._has_begun = False
        self._number = 0
        """Number of the next wish for a base: so many times ranks were done with one."""
        self._saved: dict[Identity, int] = {}
        """For each full save whose number is still to come: how many steps optimizers had begun."""

    def begin(self, save: Save | None) -> None:
        """Note that records lead on from the live state, which this full save, if any, is to hold."""
        self._has_begun, self._save = True, save

    def saved(self, identity: Identity, num_begun: int) -> None:
        """Note a full save, made when optimizers had begun so many steps."""
        self._saved[identity] = num_begun

    def is_of_another_state(self, identity: Identity, num_begun: int) -> bool:
        """True if optimizers have begun steps since the full save of this number, which is reached now."""
        saved = self._saved.get(identity, num_begun)
        self._saved = {known: num for known, num in self._saved.items() if known > identity}
        return saved != num_begun

    def has_failed(self) -> bool:
        """True, once, if the save that records lead on from is over and was in vain."""
        if self._save is None or not self._save.done():
            return False
        save, self._save = self._save, None
        return save.error is not None or save.skipped

    def is_due(self, step: int, *, wanted: bool) -> bool:
        """True if all ranks make a full save of this step.

        One rank may want it alone: it says so, and all do it at the step after, when all have heard of it.
        """
        if self._group.size == 1 or not self._has_begun:
            return wanted
        key = f"delta/base/{self._number}"
        if wanted:
            self._group.post_first(key, str(step + 1).encode())
        agreed = self._group.peek(key)
        if agreed is None or step < int(agreed):
            return False
        self.forget_wish()
        return True

    def forget_wish(self) -> None:
        """Be done with a rank's wish for a base: its step may come again.  All ranks do so together."""
        self._number += 1


class Unrecorded:
    """The steps since the newest record or full save, if no record has them, and why not."""

    def __init__(self) -> None:
        self.why = "no full save was made yet"
        self._steps: tuple[int, int] | None = None
        """The first and the last of them."""

    def add(self, step: int) -> None:
        """Count a step, until a record or a full save has it."""
        self._steps = (self._steps or (step, step))[0], step

    def forget(self) -> None:
        """A record or a full save has them, or they are not to be recorded."""
        self._steps = None

    def saved(self, step: int) -> None:
        """Forget them if a full save of this step has them."""
        if self._steps is not None and step >= self._steps[1]:
            self.forget()

    def text(self) -> str:
        """Say what is lost if the run ends now; empty if nothing is."""
        if self._steps is None:
            return ""
        first, last = self._steps
        steps = f"step {last} is" if first == last else f"steps {first} to {last} are"
        return (
            f"{steps} in no record and no full save ({self.why}): a restart does not have them; "
            f"save({last}) before close() keeps them"
        )
