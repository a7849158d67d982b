"""Plain numbers at the top of a state that never change: `{"epoch": epoch}` keeps the value that `epoch`
had when the dict was made.

An unchanged number alone proves nothing: an epoch may be long, and a best loss stay the best.  So a first
run gets no notice.  A restored run gets one if the step had the very number that the script begins with, as
if the run before had never set it, and many later saves have it, too.
"""

from __future__ import annotations

from holdfast.base.notices import Notices
from holdfast.live.state.recognising import State

SAVES = 10
"""Number of saves since a restore with an unchanged number, at which the notice comes."""


class FrozenNumbers:
    """The plain numbers of a state that no run seems to set."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._resting: dict[str, float] = {}
        """Numbers whose restored value was the script's own, and which have not changed since."""
        self._saves = 0
        self._step = -1

    def went_on(self, handed: State, restored: State, *, found: bool) -> None:
        """Begin anew with a restore.  `handed`: the script's state before it; `restored`: after it."""
        self._saves = 0
        self._resting = {
            key: restored[key]
            for key, value in handed.items()
            if found and type(value) in (int, float) and restored.get(key) == value
        }

    def look(self, state: State, step: int) -> None:
        """Compare the numbers of a state that is saved, once per step."""
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
