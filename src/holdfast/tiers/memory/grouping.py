"""The choice of the scheme and groups that protect a job's snapshots, within the memory of the nodes.

All ranks make the same choice, from rank 0's message (`Decision`).  A rank's agent stands for its node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.base.errors import OutOfSpace, UsageError
from holdfast.base.events import emit
from holdfast.base.sizes import size_text
from holdfast.core.codec.stripes import Stripes
from holdfast.policy.redundancy import choose, fitting, parity_groups, parse, replicas_apart
from holdfast.policy.survival import Scheme, none
from holdfast.tiers.memory.decision import Decision
from holdfast.tiers.memory.node.protect import guard_bytes

SNAPSHOTS = 2
"""Number of snapshots of each rank in memory: the newest complete one, and the one being filled."""

Groups = list[tuple[int, ...]]


@dataclass(frozen=True)
class Chosen:
    """The scheme that is asked for, the one that is used, its groups of ranks, and why."""

    wanted: Scheme
    scheme: Scheme
    groups: Groups
    why: str


class Grouping:
    """Makes the choice for each snapshot, and reports when it changes."""

    def __init__(self, redundancy: str, tell: Callable[[str], None]) -> None:
        """`tell` is given what the user should know."""
        self._redundancy = redundancy
        self._tell = tell
        self._reported: tuple[Scheme, str] | None = None

    def find(self, decision: Decision) -> Chosen:
        """Return the choice for a snapshot.  Events: `memory.redundancy` when it is another than
        before, `memory.weaker` if that is weaker than what was asked for."""
        chosen = chosen_for(self._redundancy, decision)
        if self._reported != (chosen.scheme, chosen.why):
            self._reported = chosen.scheme, chosen.why
            nodes = len(set(decision.card_of))
            emit(
                "memory.redundancy", wanted=self._redundancy, kept=str(chosen.scheme), nodes=nodes,
                groups=len(chosen.groups), why=chosen.why,
            )  # fmt: skip
            if chosen.scheme != chosen.wanted:
                wanted, kept = str(chosen.wanted), str(chosen.scheme)
                emit("memory.weaker", wanted=wanted, kept=kept, nodes=nodes, why=chosen.why)
                self._tell(_weaker(chosen))
        return chosen


def _weaker(chosen: Chosen) -> str:
    left = (
        f"are protected by {chosen.scheme} instead of {chosen.wanted}"
        if chosen.scheme.losses
        else f"do not survive the loss of a node: {chosen.wanted} cannot be had"
    )
    return f"snapshots in memory {left}; {chosen.why}"


def chosen_for(redundancy: str, decision: Decision) -> Chosen:
    """Return the scheme that is asked for; if it cannot be had, the strongest that can."""
    nodes = [decision.cards[i].agent for i in decision.card_of]
    asked, count = parse(redundancy), len(set(nodes))
    wanted = asked or choose(count)
    scheme = fitting(wanted, nodes, decision.class_of)
    found = parity_groups(nodes, scheme, decision.class_of)
    why = _reason(asked, scheme, count)
    if scheme != wanted:
        try:
            parity_groups(nodes, wanted, decision.class_of)
        except UsageError as error:
            why = error.message
    if asked is None and scheme.losses and (lacking := lack(decision, scheme, found)):
        alone = parity_groups(nodes, none())
        if not lack(decision, none(), alone):
            return Chosen(wanted, none(), alone, f"with {scheme}, {lacking}")
    if scheme.losses and replicas_apart(nodes, scheme, decision.class_of) is not None:
        why += (
            "; replicas on different nodes form groups, and each rank protects from its own replica"
        )
    elif scheme.losses:
        why += "; the agents of a group exchange ranges of images"
    return Chosen(wanted, scheme, found, why)


def _reason(asked: Scheme | None, scheme: Scheme, num_nodes: int) -> str:
    if asked is not None:
        return "as asked for"
    if num_nodes == 1:
        return "there is one node, so nothing is kept against its loss"
    if num_nodes == 2:
        return "there are two nodes, so each keeps a copy of the other's"
    return f"there are {num_nodes} nodes: {scheme} survives the loss of one in a group with least memory"


def kept_bytes(decision: Decision, scheme: Scheme, group: tuple[int, ...]) -> int:
    """Return the bytes of each member's guard for one snapshot; 0 if there are too few members.  Ranks
    that save nothing are no members."""
    lengths = tuple(n for n in (decision.sizes[r] for r in group) if n)
    if not scheme.losses or len(lengths) <= scheme.losses:
        return 0
    return guard_bytes(Stripes(lengths, *scheme.blocks(len(lengths))))


def lack(decision: Decision, scheme: Scheme, found: Groups) -> str:
    """Return a message that names a node whose budget does not hold the snapshots of its ranks; empty
    if there is none."""
    ranks = len(decision.card_of)
    own, kept, num_ranks = ([0] * len(decision.cards) for _ in range(3))
    for group in found:
        each = kept_bytes(decision, scheme, group)
        for rank in group:
            card = decision.card_of[rank]
            own[card] += SNAPSHOTS * decision.memory[rank]
            kept[card] += SNAPSHOTS * each if decision.sizes[rank] else 0
            num_ranks[card] += 1
    for card, budget in enumerate(decision.budgets):
        if own[card] + kept[card] > budget:
            first = min(r for r in range(ranks) if decision.card_of[r] == card)
            return (
                f"snapshots of the {num_ranks[card]} rank(s) on the node of rank {first} take "
                f"{own[card] + kept[card]} bytes ({SNAPSHOTS} of each: {size_text(own[card])} of images, "
                f"{size_text(kept[card])} kept for others, {scheme}): the job's budget is {budget} bytes"
            )
    return ""


def check_room(decision: Decision, chosen: Chosen) -> None:
    """OutOfSpace if some node's budget does not hold both snapshots with what is kept for others."""
    if text := lack(decision, chosen.scheme, chosen.groups):
        raise OutOfSpace(
            text, hint="raise Memory(budget=...), or choose a redundancy that takes less"
        )
