"""Protection groups of ranks: their choice, their memory, and the losses that they survive.

A *group* is a set of ranks on different nodes; losing a node loses one member of each of its groups.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.base.arguments import shown
from holdfast.base.errors import UsageError
from holdfast.base.suggest import did_you_mean
from holdfast.policy.survival import (
    Scheme,
    copy,
    failure_within,
    fatal_sets,
    loss,
    none,
    rs,
    time_to_loss,
)

_MAX_GROUP = 8
"""Most members of a group: larger groups need less memory, but lose two members more often."""

RECOMPUTE = "recompute"
"""Like `copy`, but the keeper recomputes optimizer states from gradients."""
_FORMS = ("auto", "none", "copy", "copy(3)", "parity", "rs(2)", RECOMPUTE)
_CALL = re.compile(r"(copy|rs)\((\d{1,2})\)")


def parse(text: str) -> Scheme | None:
    """A scheme by its name; None for `auto`.  UsageError for anything else."""
    named = {"none": none(), "copy": copy(2), "parity": rs(1), RECOMPUTE: copy(2)}
    if text == "auto" or text in named:
        return named.get(text)
    call = _CALL.fullmatch(text.replace(" ", ""))
    if call and call[1] == "copy" and int(call[2]) >= 2:
        return copy(int(call[2]))
    if call and call[1] == "rs" and int(call[2]) >= 1:
        return rs(int(call[2]))
    hint = did_you_mean(text, _FORMS) or "one of " + ", ".join(_FORMS)
    raise UsageError(f"redundancy={shown(text)} is no scheme", hint=hint)


def choose(num_nodes: int) -> Scheme:
    """Return the scheme of `auto`: parity for three nodes or more, a copy for two, none for one."""
    if num_nodes < 2:
        return none()
    return copy(2) if num_nodes == 2 else rs(1)


def parity_groups(
    nodes: Sequence[str], scheme: Scheme, holdings: Sequence[int] | None = None
) -> list[tuple[int, ...]]:
    """Return the groups of ranks, each rank in one; `nodes`: the name of each rank's node.

    `holdings`: a number per rank, equal for ranks with the same state (replicas).  If replicas are on
    enough nodes, they form a group, and each computes its guards from its own replica.  Else the i-th
    ranks of all nodes form groups of nearly equal size, at most `_MAX_GROUP`.  If nodes have different
    numbers of ranks and some ranks would be left over, ranks are dealt to as many groups as the fullest
    node has ranks.  The ranks of a single node form one group: that repairs damage, but not the loss of
    the node.

    UsageError if a group would be too small for the scheme.
    """
    if not scheme.losses:
        return [(rank,) for rank in range(len(nodes))]
    least = scheme.losses + 1
    most = max(_MAX_GROUP, least)
    alike = replicas_apart(nodes, scheme, holdings)
    if alike is not None:
        return [group for row in alike for group in _even(row, least, most)]
    if len(set(nodes)) == 1:
        rows = [list(range(len(nodes)))]
    else:
        by_place: dict[int, list[int]] = {}
        seen: dict[str, int] = {}
        for rank, node in enumerate(nodes):
            place = seen[node] = seen.get(node, -1) + 1
            by_place.setdefault(place, []).append(rank)
        rows = [by_place[place] for place in sorted(by_place)]
    found = [group for row in rows for group in _even(row, least, most)]
    short = [group for group in found if len(group) <= scheme.losses]
    if short and len(rows) > 1:
        found = _dealt(nodes, least, most) or found
        short = [group for group in found if len(group) <= scheme.losses]
    if short:
        raise UsageError(
            f"redundancy='{scheme}' needs groups of {scheme.losses + 1} ranks on different nodes; "
            f"rank {short[0][0]} finds {len(short[0]) - 1} others",
            hint="as many ranks on every node, more nodes, or a scheme that needs fewer",
        )
    return found


def replicas_apart(
    nodes: Sequence[str], scheme: Scheme, holdings: Sequence[int] | None
) -> list[list[int]] | None:
    """Return the sets of replicas if each is on different nodes, enough for the scheme; else None."""
    if holdings is None:
        return None
    alike: dict[int, list[int]] = {}
    for rank, kind in enumerate(holdings):
        alike.setdefault(kind, []).append(rank)
    rows = list(alike.values())
    are_apart = all(len({nodes[rank] for rank in row}) == len(row) for row in rows)
    return rows if are_apart and all(len(row) > scheme.losses for row in rows) else None


def fitting(scheme: Scheme, nodes: Sequence[str], holdings: Sequence[int] | None = None) -> Scheme:
    """Return the scheme, or the strongest possible one if there are too few nodes for it."""
    while scheme.losses:
        try:
            parity_groups(nodes, scheme, holdings)
        except UsageError:
            scheme = Scheme(scheme.kind, scheme.losses - 1)
        else:
            break
    return scheme if scheme.losses else none()


def _dealt(nodes: Sequence[str], least: int, most: int) -> list[tuple[int, ...]]:
    """Deal ranks, node by node, to as many groups as the fullest node has ranks, so that no group has two
    ranks of a node.  Empty if groups would be too small; no other division has larger ones.
    """
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    fullest = max(map(len, by_node.values()))
    in_order = [rank for ranks in by_node.values() for rank in ranks]
    for count in (max(fullest, -(-len(nodes) // most)), fullest):
        if len(nodes) // count >= least:
            return [tuple(in_order[i::count]) for i in range(count)]
    return []


def _even(row: list[int], least: int, most: int) -> list[tuple[int, ...]]:
    """Split a row into nearly equal parts of `least` to `most` members."""
    count = max(1, min(-(-len(row) // most), len(row) // least))
    cuts = [len(row) * i // count for i in range(count + 1)]
    return [tuple(row[a:b]) for a, b in zip(cuts, cuts[1:])]


# -- what a scheme costs and bears ----------------------------------------------------------------


_SNAPSHOTS = 2
"""Snapshots of each rank in memory: the newest complete one, and one being written."""


@dataclass(frozen=True)
class Protection:
    """A scheme on a cluster: its groups, host memory and survivable losses."""

    scheme: Scheme
    nodes: tuple[str, ...]
    """Name of each rank's node, by rank."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks of each group."""
    share_bytes: int
    """Bytes of the largest image of a rank."""
    kept_bytes: int
    """Most guard bytes of a rank per snapshot."""
    node_bytes: int
    """Bytes of all snapshots on the fullest node."""
    bears: int
    """Number of nodes, whichever they are, whose loss is survived."""
    fatal: tuple[frozenset[str], ...]
    """The smallest sets of nodes whose loss is not survived."""
    loss: float
    """Probability that so many nodes fail before they are replaced."""
    time_to_loss_s: float


def protection(
    scheme: Scheme,
    nodes: Sequence[str],
    shares: Sequence[int],
    holdings: Sequence[int] | None = None,
    *,
    node_mtbf_s: float,
    repair_s: float,
) -> Protection:
    """Compute the protection by a scheme; `nodes` and `holdings` as for `parity_groups`, `shares`: image
    bytes.

    Nodes fail at a constant rate and are replaced within `repair_s`.  UsageError if the scheme needs more.
    """
    found = parity_groups(nodes, scheme, holdings)
    kept: dict[int, int] = {}
    for group in found:
        k, m = scheme.blocks(len(group))
        largest = max(shares[r] for r in group)
        kept |= {r: -(-largest * m // k) for r in group}
    numbers = {name: i for i, name in enumerate(dict.fromkeys(nodes))}
    names = list(numbers)
    by_node = [0] * len(numbers)
    for rank, node in enumerate(nodes):
        by_node[numbers[node]] += _SNAPSHOTS * (shares[rank] + kept[rank])
    on_nodes = [tuple(numbers[nodes[r]] for r in group) for group in found]
    largest_set = min(scheme.losses + 1, len(numbers))
    fatal = fatal_sets(scheme, on_nodes, largest_set) if len(numbers) <= 64 else []
    lost = loss(scheme, on_nodes, failure_within(node_mtbf_s, repair_s))
    return Protection(
        scheme, tuple(nodes), tuple(found), max(shares), max(kept.values()), max(by_node),
        _bears(scheme, on_nodes),
        tuple(frozenset(names[i] for i in some) for some in fatal), lost,
        time_to_loss(lost, repair_s),
    )  # fmt: skip


def _bears(scheme: Scheme, on_nodes: list[tuple[int, ...]]) -> int:
    """Number of nodes, whichever they are, whose loss is survived."""
    apart = all(len(set(group)) == len(group) for group in on_nodes)
    return scheme.losses if apart else 0
