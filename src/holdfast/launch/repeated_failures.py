"""Repeated failures: is the script to blame, a device, or the node?

The same failure three times in one place has one of two causes.  If it stops when that device or node is
left out, the device or the node was to blame.  If it then comes back elsewhere, the script is to blame, and
no restart helps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.launch.nodes import RankFailure

SAME = 3
"""Number of equal failures after which a restart alone is no answer."""
QUICK_S = 60.0
"""A failure within this many seconds of the attempt's beginning counts as immediate."""


@dataclass(frozen=True, slots=True)
class _Seen:
    failure: tuple[int, int, str]
    node: str
    slot: int
    is_quick: bool
    says_when: bool
    """The step of the failure is known, and the failure is beyond doubt."""


@dataclass
class Failures:
    """The last failures of the run."""

    _seen: list[_Seen] = field(default_factory=list)

    def note(self, failure: RankFailure, node: str, slot: int, after_s: float) -> None:
        """Note the failure to blame, `after_s` seconds after the beginning; `slot`: -1 on another node.

        A doubtful hang never counts as equal to another failure.
        """
        rank = -1 if failure.is_of_script else failure.rank
        what = (rank, failure.step, failure.how)
        counts = not failure.doubtful_s
        seen = _Seen(what, node, slot, counts and after_s < QUICK_S, counts and failure.step > 0)
        self._seen = [*self._seen[1 - SAME :], seen]

    @property
    def are_same(self) -> bool:
        """The same step failed in the same way each time; if ranks were killed, it was the same rank.

        Without a known step (a script without a Checkpointer), only immediate failures count as equal.
        """
        alike = len(self._seen) == SAME and len({seen.failure for seen in self._seen}) == 1
        return alike and all(seen.says_when or seen.is_quick for seen in self._seen)

    @property
    def are_of_a_slot(self) -> bool:
        """The rank of the same slot of this node failed immediately, each time."""
        return self.are_of_a_node and len({seen.slot for seen in self._seen}) == 1

    @property
    def are_of_a_node(self) -> bool:
        """Ranks of the same node failed immediately, each time."""
        is_one = len({seen.node for seen in self._seen}) == 1
        return is_one and len(self._seen) == SAME and all(seen.is_quick for seen in self._seen)

    def forget(self) -> None:
        """Count from zero again: a device or a node was left out."""
        self._seen = []


def cause(failure: RankFailure) -> str:
    """Return the text that identifies a failure wherever it happens."""
    return f"after step {failure.step}: {failure.how}"
