"""The saves of a run that wait to be uploaded.

A save has a number, the same on all ranks.  It waits from its commit in the root until it is
settled: uploaded, or left out.  With a save all saves before it are settled, too, as only the
newest is uploaded:

    number    1    2    3    4    5    6
              settled   waiting   on their way into the root
                             ^
                             newest, which this rank names when all ranks choose

Saves are numbered on the training thread, come to wait on the thread that ends them, and are
settled on the upload thread.
"""

from __future__ import annotations

import threading

import msgspec

from holdfast.live.saving import Save


class Newest(msgspec.Struct, frozen=True, array_like=True):
    """The newest save that a rank knows to be committed: its number in this run, and its step.

    Number 0 stands for the newest step that earlier runs left in the root, if it is not uploaded yet.
    """

    number: int
    step: int = -1


class WaitingSaves:
    """The saves that wait, and the newest that is known to be committed."""

    def __init__(self) -> None:
        """Begin with number 0: what earlier runs have left to be uploaded."""
        self.newest = Newest(0)
        self._num_saves = 0
        self._settled = -1
        """Number of the newest save that is settled."""
        self._saves: dict[int, Save] = {}
        """Saves that are committed in the root and not settled, by number."""
        self._lock = threading.Lock()

    def next_number(self) -> int:
        """Return the number of the next save.  On the training thread."""
        self._num_saves += 1
        return self._num_saves

    def add(self, number: int, save: Save) -> None:
        """Add a committed save.  On any thread, and in any order of numbers."""
        with self._lock:
            self._saves[number] = save
            if number > self.newest.number:
                self.newest = Newest(number, save.step)

    @property
    def has_newer(self) -> bool:
        """True if the newest save is newer than all that are settled."""
        return self.newest.number > self._settled

    def settle(self, number: int) -> dict[int, Save]:
        """Note that a save and all before it are settled; return those that waited, by number."""
        with self._lock:
            self._settled = max(self._settled, number)
            settled = sorted(n for n in self._saves if n <= number)
            return {n: self._saves.pop(n) for n in settled}

    def last_step(self) -> int | None:
        """Return the step of the newest save that waits; None if none does."""
        with self._lock:
            last = max(self._saves, default=None)
            return None if last is None else self._saves[last].step
