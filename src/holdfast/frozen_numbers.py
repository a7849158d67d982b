"""Plain numbers at the top of a state that never change: `{"epoch": epoch}` holds what `epoch` was when the
dict was made, for ever.

A number that changes from time to time, or at all, is never told of; one that is really constant is, once.
"""

from __future__ import annotations

from holdfast.notices import Notices
from holdfast.state.live import State

SAVES = 10
"""Number of saves over which a number may stay as it is."""


class FrozenNumbers:
    """The plain numbers of a state, as durable saves have found them."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._seen: dict[str, tuple[float, int]] = {}
        """Each value, and in how many saves it was that: negative if it has changed."""
        self._step = -1

    def look(self, state: State, step: int) -> None:
        """Look at the numbers of a state that is saved as another step than before."""
        if step == self._step:
            return
        self._step = step
        for key, value in state.items():
            if type(value) is not int and type(value) is not float:
                continue
            before, saves = self._seen.get(key, (value, 0))
            saves = -1 if saves < 0 or before != value else saves + 1
            self._seen[key] = value, saves
            if saves == SAVES:
                self._notices.once(
                    "frozen-number",
                    f"{key!r} of the state was {value} in each of {SAVES} saves: a number is saved as the "
                    f"dict has it, so if it is to count, set ckpt.state[{key!r}] before each save",
                    about=key,
                )
