"""The full saves that records lead on from, and the steps that neither records nor full saves hold."""

from __future__ import annotations

from holdfast.core.group import Group
from holdfast.live.saving import Save
from holdfast.tiers.records.segment import Identity


class Bases:
    """The full saves that records begin with: when all ranks make one, and whether it succeeded."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._save: Save | None = None
        self._has_begun = False
        self._number = 0
        """Number of the next request for a base: how many were met or forgotten before."""
        self._saved: dict[Identity, int] = {}
        """Number of steps that optimizers had begun at each full save whose step is still to come."""

    def begin(self, save: Save | None) -> None:
        """Note that records lead on from the live state.  `save`: the full save of it, if one is made."""
        self._has_begun, self._save = True, save

    def saved(self, identity: Identity, num_begun: int) -> None:
        """Note a full save, made when optimizers had begun so many steps."""
        self._saved[identity] = num_begun

    def is_of_another_state(self, identity: Identity, num_begun: int) -> bool:
        """True if optimizers have begun steps since the full save of a step that is reached now."""
        saved = self._saved.get(identity, num_begun)
        self._saved = {known: num for known, num in self._saved.items() if known > identity}
        return saved != num_begun

    def has_failed(self) -> bool:
        """True, once, if the save that records lead on from has failed or was skipped."""
        if self._save is None or not self._save.done():
            return False
        save, self._save = self._save, None
        return save.error is not None or save.skipped

    def is_due(self, step: int, *, wanted: bool) -> bool:
        """True if all ranks make a full save of this step.

        If only one rank wants it, that rank posts the number of the next step, at which all ranks have read
        the request and make the save.
        """
        if self._group.size == 1 or not self._has_begun:
            return wanted
        key = f"delta/base/{self._number}"
        if wanted:
            self._group.post_first(key, str(step + 1).encode())
        agreed = self._group.peek(key)
        if agreed is None or step < int(agreed):
            return False
        self.forget_request()
        return True

    def forget_request(self) -> None:
        """Forget a rank's request for a base.  All ranks call it together."""
        self._number += 1


class Unrecorded:
    """The steps since the newest record or full save, and why no record has them."""

    def __init__(self) -> None:
        self.why = "no full save was made yet"
        self._steps: tuple[int, int] | None = None
        """The first and the last of them."""

    def add(self, step: int) -> None:
        """Count a step, until a record or a full save has it."""
        self._steps = (self._steps or (step, step))[0], step

    def forget(self) -> None:
        """Forget these steps: a record or a full save has them, or they need not be recorded."""
        self._steps = None

    def saved(self, step: int) -> None:
        """Forget these steps if a full save of `step` has them."""
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
