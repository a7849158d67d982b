"""The probability that a snapshot in host memory survives the loss of nodes.

A snapshot is lost when a group's shares cannot be rebuilt from the remaining nodes.  Process failures do
no harm, as an agent holds the memory.  p = 1 - q is the probability that a node survives the interval.
Probability of survival, for members on nodes of their own (after REFT, Wang et al., 2023):

    none        p^n
    rs(m)       sum over j <= m of C(n, j) p^(n - j) q^j           parity is rs(1)
    copy(r)     no r neighbours in the ring all fail: a circular run of failures is shorter than r
    G groups    the product over groups that share no node

This module computes the probability of loss instead, as a sum of positive terms: a loss of 1e-20 is not
rounded to 0, so times to a loss are finite.  Nodes may fail with different probabilities.  Groups that
share nodes, and members of a group that share a node, fail together: they are counted exactly, by sets of
lost nodes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from holdfast.base.errors import UsageError

Nodes = tuple[int, ...]
"""The node of each member of a group, in the order of the ring."""

_MOST_SETS = 200_000
"""Most sets of lost nodes that `loss` enumerates, which takes seconds."""


def failure_within(mtbf_s: float, interval_s: float) -> float:
    """Probability that a node fails within an interval, at a constant rate of 1 / `mtbf_s`."""
    return -math.expm1(-interval_s / mtbf_s)


@dataclass(frozen=True, slots=True)
class Scheme:
    """A redundancy scheme and the losses per group that it always survives.

    `rs` survives the loss of any `losses` members, and no more; `copy` survives any loss without `losses
    + 1` neighbours.  `none` is rs(0).
    """

    kind: Literal["copy", "rs"]
    losses: int

    def __str__(self) -> str:
        if not self.losses:
            return "none"
        if self.kind == "copy":
            return f"copy({self.losses + 1})"
        return "parity" if self.losses == 1 else f"rs({self.losses})"

    def blocks(self, num_members: int) -> tuple[int, int]:
        """(data, parity) blocks of a stripe in a group of `num_members`; see `codec.stripes`."""
        if self.kind == "copy" or not self.losses:
            return 1, self.losses
        return num_members - self.losses, self.losses

    def survives(self, lost: Sequence[bool]) -> bool:
        """True if a group survives these losses; one flag per member, in the order of the ring."""
        self.check(len(lost))
        if self.kind == "rs":
            return sum(lost) <= self.losses
        return _longest_run(lost) <= self.losses

    def check(self, num_members: int) -> None:
        """UsageError if a group of `num_members` is too small for this scheme."""
        if not 0 <= self.losses < num_members:
            raise UsageError(f"a group of {num_members} cannot survive {self.losses} losses")


def none() -> Scheme:
    """No redundancy."""
    return Scheme("rs", 0)


def copy(copies: int) -> Scheme:
    """Each share on its member and the next `copies - 1` members."""
    return Scheme("copy", copies - 1)


def rs(losses: int) -> Scheme:
    """Stripes with `losses` parity blocks: any `losses` members may be lost."""
    return Scheme("rs", losses)


def _longest_run(lost: Sequence[bool]) -> int:
    """Longest run of losses around a ring."""
    if all(lost):
        return len(lost)
    first = list(lost).index(False)
    longest = run = 0
    for one in (*lost[first:], *lost[:first]):
        run = run + 1 if one else 0
        longest = max(longest, run)
    return longest


# -- one group, members on nodes of their own -----------------------------------------------------


def group_loss(scheme: Scheme, failures: Sequence[float]) -> float:
    """Probability that a group is lost; member i fails independently with probability `failures[i]`."""
    scheme.check(len(failures))
    return (_count_loss if scheme.kind == "rs" else _ring_loss)(failures, scheme.losses)


def _count_loss(failures: Sequence[float], losses: int) -> float:
    """Probability of more than `losses` failures: the tail of a Poisson binomial distribution."""
    by_count, lost = [1.0] + [0.0] * losses, 0.0
    for q in failures:
        lost += by_count[-1] * q
        fewer = [0.0, *by_count[:-1]]
        by_count = [same * (1 - q) + less * q for same, less in zip(by_count, fewer)]
    return lost


def _ring_loss(failures: Sequence[float], losses: int) -> float:
    """Probability of a circular run of more than `losses` failures: a sum over the length of its first
    run."""
    total, begins = 0.0, 1.0
    for first in range(losses + 1):
        rest = failures[first + 1 :]
        total += begins * (1 - failures[first]) * _line_loss(rest, losses, first)
        begins *= failures[first]
    return total + begins


def _line_loss(failures: Sequence[float], losses: int, joined: int) -> float:
    """Probability of a run of more than `losses` failures in a line that `joined` failures follow."""
    by_run, lost = [1.0] + [0.0] * losses, 0.0
    for q in failures:
        lost += by_run[-1] * q
        by_run = [sum(by_run) * (1 - q), *(b * q for b in by_run[:-1])]
    return lost + sum(b for run, b in enumerate(by_run) if run + joined > losses)


# -- groups over nodes ----------------------------------------------------------------------------


def survives(scheme: Scheme, groups: Collection[Nodes], lost: Collection[int]) -> bool:
    """True if every group survives the loss of these nodes."""
    return all(scheme.survives([node in lost for node in group]) for group in groups)


def fatal_sets(scheme: Scheme, groups: Collection[Nodes], largest: int) -> list[frozenset[int]]:
    """The minimal fatal sets of up to `largest` nodes: the loss of any proper subset is survived."""
    found = {some for group in set(groups) for some in _fatal_to(scheme, group, largest)}
    return sorted((s for s in found if not any(other < s for other in found)), key=sorted)


def _fatal_to(scheme: Scheme, group: Nodes, largest: int) -> list[frozenset[int]]:
    found: list[frozenset[int]] = []
    for size in range(1, largest + 1):
        sets = map(frozenset, combinations(sorted(set(group)), size))
        fatal = [some for some in sets if not survives(scheme, [group], some)]
        found += [some for some in fatal if not any(smaller < some for smaller in found)]
    return found


def loss(scheme: Scheme, groups: Collection[Nodes], failures: float | Mapping[int, float]) -> float:
    """Exact probability that a group is lost; `failures`: that of a node's failure, one for all or by node.

    UsageError if too many nodes are connected through shared groups to enumerate sets of losses.
    """
    survival = 0.0  # its logarithm
    for part in _independent(set(groups)):
        nodes = sorted({node for group in part for node in group})
        q = failures if isinstance(failures, Mapping) else dict.fromkeys(nodes, failures)
        lost = _part_loss(scheme, part, q)
        if lost >= 1:
            return 1.0
        survival += math.log1p(-lost)
    return -math.expm1(survival)


def time_to_loss(loss_per_interval: float, interval_s: float) -> float:
    """Expected seconds until a snapshot is lost, interval / loss (a geometric number of intervals).

    An interval is the time to replace every lost node and restore protection, or the time between snapshots
    if that is longer; intervals are independent.  In Young's and Daly's formulas for the interval of
    durable checkpoints, the result replaces the MTBF.
    """
    return interval_s / loss_per_interval if loss_per_interval else math.inf


def _independent(groups: set[Nodes]) -> list[list[Nodes]]:
    """Connected components of groups, where groups that share a node are connected."""
    parts: list[tuple[set[int], list[Nodes]]] = []
    for group in sorted(groups):
        nodes, members = set(group), [group]
        for part in [p for p in parts if p[0] & nodes]:
            parts.remove(part)
            nodes |= part[0]
            members += part[1]
        parts.append((nodes, members))
    return [members for _, members in parts]


def _part_loss(scheme: Scheme, groups: list[Nodes], failures: Mapping[int, float]) -> float:
    (group, *others) = groups
    if not others and len(set(group)) == len(group):
        return group_loss(scheme, [failures[node] for node in group])
    return _loss_by_sets(scheme, groups, failures)


def _loss_by_sets(scheme: Scheme, groups: list[Nodes], failures: Mapping[int, float]) -> float:
    """Sum over the sets of lost nodes, built node by node; a fatal set is not extended."""
    nodes = sorted({node for group in groups for node in group})
    groups_of = {node: [g for g in groups if node in g] for node in nodes}
    total, num_sets = 0.0, 0
    undecided: list[tuple[int, frozenset[int], float]] = [(0, frozenset(), 1.0)]
    while undecided:  # sets of lost nodes among the first `at`, with probabilities
        at, lost, probability = undecided.pop()
        for i in range(at, len(nodes)):
            more, failed = lost | {nodes[i]}, probability * failures[nodes[i]]
            probability *= 1 - failures[nodes[i]]
            num_sets += 1
            if num_sets > _MOST_SETS:
                raise UsageError(
                    f"{len(nodes)} nodes hang together through their groups: "
                    "too many sets of losses to count",
                    hint="place groups so that they share all their nodes or none",
                )
            if survives(scheme, groups_of[nodes[i]], more):
                undecided.append((i + 1, more, failed))
            else:
                total += failed
    return total
