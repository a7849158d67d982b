"""The choice of which ranks protect each other's snapshots, how, and what that costs and bears.  Pure.

A *group* is a set of ranks on different nodes; the loss of a node takes one member from each of its groups.
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
    exponential,
    fatal_sets,
    loss,
    none,
    rs,
    time_to_loss,
)

_MAX_GROUP = 8
"""Members of a group: more cost less memory, and are likelier to lose two at once."""

RECOMPUTE = "recompute"
"""A copy whose optimizer states the rank that keeps it redoes from gradients."""
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
    """The scheme that `auto` means: parity with three nodes or more, a copy with two, nothing with
    one."""
    if num_nodes < 2:
        return none()
    return copy(2) if num_nodes == 2 else rs(1)


def parity_groups(
    nodes: Sequence[str], scheme: Scheme, holdings: Sequence[int] | None = None
) -> list[tuple[int, ...]]:
    """Ranks in groups, from the name of each rank's node; every rank is in one.

    `holdings`: numbers that ranks share which hold the same state.  Where such ranks are on enough nodes,
    they are one another's group: each can make what it keeps from its own replica.  Else the i-th ranks of
    all nodes make up groups.  These are of even size, `_MAX_GROUP` at most.  Where nodes have different
    numbers of ranks and some would be left over, ranks are dealt to as many groups as the fullest node has
    ranks.  On a single node, its ranks are a group: that mends damage, not the loss of the node.
    UsageError if a rank finds too few others.
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
    """The ranks that hold the same, where they are on enough different nodes for the scheme."""
    if holdings is None:
        return None
    alike: dict[int, list[int]] = {}
    for rank, kind in enumerate(holdings):
        alike.setdefault(kind, []).append(rank)
    rows = list(alike.values())
    are_apart = all(len({nodes[rank] for rank in row}) == len(row) for row in rows)
    return rows if are_apart and all(len(row) > scheme.losses for row in rows) else None


def fitting(scheme: Scheme, nodes: Sequence[str], holdings: Sequence[int] | None = None) -> Scheme:
    """The scheme, or if there are too few nodes for it, as after a loss, the strongest that there are."""
    while scheme.losses:
        try:
            parity_groups(nodes, scheme, holdings)
        except UsageError:
            scheme = Scheme(scheme.kind, scheme.losses - 1)
        else:
            break
    return scheme if scheme.losses else none()


def _dealt(nodes: Sequence[str], least: int, most: int) -> list[tuple[int, ...]]:
    """Ranks, node by node, dealt to groups as cards are: no two of a node in one, as long as there are as
    many groups as ranks on a node.  Empty if groups would be too small; no other division has larger ones.
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
    """A row in parts as even as can be, of `most` at most, but none smaller than `least`."""
    count = max(1, min(-(-len(row) // most), len(row) // least))
    cuts = [len(row) * i // count for i in range(count + 1)]
    return [tuple(row[a:b]) for a, b in zip(cuts, cuts[1:])]


# -- what a scheme costs and bears ----------------------------------------------------------------


_SNAPSHOTS = 2
"""Snapshots of each rank in memory: the newest complete one, and the one that is being filled."""


@dataclass(frozen=True)
class Protection:
    """One scheme on a cluster.  Bytes are of host memory, times in seconds."""

    scheme: Scheme
    nodes: tuple[str, ...]
    """Name of each rank's node, by rank."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks of each group."""
    share_bytes: int
    """Bytes of the largest image of a rank."""
    kept_bytes: int
    """Bytes that a rank keeps for its group, per snapshot, at most."""
    node_bytes: int
    """Bytes of both snapshots on the node that holds most."""
    bears: int
    """Number of nodes that may be lost, whichever they are."""
    fatal: tuple[frozenset[str], ...]
    """The smallest sets of nodes whose loss is not borne."""
    loss: float
    """Probability that nodes fail fatally before they are replaced."""
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
    """A scheme for ranks on these nodes, with images of so many bytes; `holdings` as for `parity_groups`.

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
    lost = loss(scheme, on_nodes, exponential(node_mtbf_s).failure(repair_s))
    return Protection(
        scheme, tuple(nodes), tuple(found), max(shares), max(kept.values()), max(by_node),
        _bears(scheme, on_nodes),
        tuple(frozenset(names[i] for i in some) for some in fatal), lost,
        time_to_loss(lost, repair_s),
    )  # fmt: skip


def _bears(scheme: Scheme, on_nodes: list[tuple[int, ...]]) -> int:
    """Number of nodes that may be lost, whichever they are."""
    apart = all(len(set(group)) == len(group) for group in on_nodes)
    return scheme.losses if apart else 0
