"""Failures that come again: is it the script, a device, or the node?

The same failure three times in one place has one of two causes.  If it goes away with the place, it was the
place's: a device, or a node.  If it then comes in another place, it is the script's, and no restart helps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.launch.nodes import RankFailure

SAME = 3
"""The number of times that a failure comes before something else is done than to restart."""
QUICK_S = 60.0
"""A failure within so many seconds of the beginning counts as one at once."""


@dataclass(frozen=True, slots=True)
class _Seen:
    failure: tuple[int, int, str]
    node: str
    slot: int
    is_quick: bool
    says_when: bool
    """The step is known at which ranks failed, and that they did is beyond doubt."""


@dataclass
class Failures:
    """The last failures of the run."""

    _seen: list[_Seen] = field(default_factory=list)

    def note(self, failure: RankFailure, node: str, slot: int, after_s: float) -> None:
        """Note what was to blame, `after_s` seconds after the beginning; `slot`: -1 on another node.

        Where it is doubtful that ranks hung, it is no failure that could be the same as another one.
        """
        rank = -1 if failure.is_of_script else failure.rank
        what = (rank, failure.step, failure.how)
        counts = not failure.doubtful_s
        seen = _Seen(what, node, slot, counts and after_s < QUICK_S, counts and failure.step > 0)
        self._seen = [*self._seen[1 - SAME :], seen]

    @property
    def are_same(self) -> bool:
        """The same step has failed in the same way, each time; one that was killed, on the same rank.

        Where no step is known, as of a script without a Checkpointer, failures were at the same step only
        if they came at once.
        """
        alike = len(self._seen) == SAME and len({seen.failure for seen in self._seen}) == 1
        return alike and all(seen.says_when or seen.is_quick for seen in self._seen)

    @property
    def are_of_a_slot(self) -> bool:
        """The rank of the same slot of this node has failed at once, each time."""
        return self.are_of_a_node and len({seen.slot for seen in self._seen}) == 1

    @property
    def are_of_a_node(self) -> bool:
        """Ranks of the same node have failed at once, each time."""
        is_one = len({seen.node for seen in self._seen}) == 1
        return is_one and len(self._seen) == SAME and all(seen.is_quick for seen in self._seen)

    def forget(self) -> None:
        """Begin to count anew: a place was left out."""
        self._seen = []


def cause(failure: RankFailure) -> str:
    """Return what is the same about a failure in another place."""
    return f"after step {failure.step}: {failure.how}"
