"""Plain numbers at the top of a state that never change: `{"epoch": epoch}` holds what `epoch` was when the
dict was made, for ever.

That a number rests tells nothing: an epoch may be long, and a best loss stay the best.  So a first run is
told nothing.  One that goes on is, where the step had the very number that the script began with again, as
if the run before had never set it, and many more saves have it, too.
"""

from __future__ import annotations

from holdfast.base.notices import Notices
from holdfast.live.state.recognising import State

SAVES = 10
"""Number of saves since a restore over which a number may stay as it is."""


class FrozenNumbers:
    """The plain numbers of a state that no run seems to set."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._resting: dict[str, float] = {}
        """Numbers that were restored as the script had them, and have not changed since."""
        self._saves = 0
        self._step = -1

    def went_on(self, handed: State, restored: State, *, found: bool) -> None:
        """Begin anew with a restore: what the script had handed over, and what the step has."""
        self._saves = 0
        self._resting = {
            key: restored[key]
            for key, value in handed.items()
            if found and type(value) in (int, float) and restored.get(key) == value
        }

    def look(self, state: State, step: int) -> None:
        """Look at the numbers of a state that is saved as another step than before."""
        if step == self._step or not self._resting:
            return
        self._step = step
        self._saves += 1
        resting = self._resting
        self._resting = {k: v for k, v in resting.items() if k in state and state[k] is v}
        for key, value in self._resting.items() if self._saves == SAVES else ():
            self._notices.once(
                "frozen-number",
                f"{key!r} of the state was {value} when the run before was saved, and in each of {SAVES} "
                "saves since: a number is saved as the dict has it, so if it is to count, set "
                f"ckpt.state[{key!r}] before each save",
                about=key,
            )
