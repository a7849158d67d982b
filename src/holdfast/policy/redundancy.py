"""The choice of which ranks protect each other's snapshots, and how.  Pure.

A *group* is a set of ranks on different nodes; the loss of a node takes one member from each of its groups.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from holdfast.arguments import shown
from holdfast.errors import UsageError
from holdfast.near import near
from holdfast.policy.survival import Scheme, copy, none, rs

MAX_GROUP = 8
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
    hint = near(text, _FORMS) or "one of " + ", ".join(_FORMS)
    raise UsageError(f"redundancy={shown(text)} is no scheme", hint=hint)


def choose(num_nodes: int) -> Scheme:
    """The scheme that `auto` means: parity with three nodes or more, a copy with two, nothing with
    one."""
    if num_nodes < 2:
        return none()
    return copy(2) if num_nodes == 2 else rs(1)


def groups(
    nodes: Sequence[str],
    scheme: Scheme,
    holdings: Sequence[int] | None = None,
    most: int = MAX_GROUP,
) -> list[tuple[int, ...]]:
    """Ranks in groups, from the name of each rank's node; every rank is in one.

    `holdings`: numbers that ranks share which hold the same state.  Where such ranks are on enough nodes,
    they are one another's group: each can make what it keeps from its own replica.  Else the i-th ranks of
    all nodes make up groups.  These are of even size, `most` at most.  Where nodes have different numbers
    of ranks and some would be left over, ranks are dealt to as many groups as the fullest node has ranks.
    On a single node, its ranks are a group: that mends damage, not the loss of the node.  UsageError if a
    rank finds too few others.
    """
    if not scheme.losses:
        return [(rank,) for rank in range(len(nodes))]
    least = scheme.losses + 1
    alike = replicas_apart(nodes, scheme, holdings)
    if alike is not None:
        return [group for row in alike for group in _even(row, least, max(most, least))]
    if len(set(nodes)) == 1:
        rows = [list(range(len(nodes)))]
    else:
        by_place: dict[int, list[int]] = {}
        seen: dict[str, int] = {}
        for rank, node in enumerate(nodes):
            place = seen[node] = seen.get(node, -1) + 1
            by_place.setdefault(place, []).append(rank)
        rows = [by_place[place] for place in sorted(by_place)]
    found = [group for row in rows for group in _even(row, least, max(most, least))]
    short = [group for group in found if len(group) <= scheme.losses]
    if short and len(rows) > 1:
        found = _dealt(nodes, least, max(most, least)) or found
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
    fit = all(_apart(row, nodes) and len(row) > scheme.losses for row in alike.values())
    return list(alike.values()) if fit else None


def fitting(scheme: Scheme, nodes: Sequence[str], holdings: Sequence[int] | None = None) -> Scheme:
    """The scheme, or if there are too few nodes for it, as after a loss, the strongest that there are."""
    while scheme.losses:
        try:
            groups(nodes, scheme, holdings)
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


def _apart(row: list[int], nodes: Sequence[str]) -> bool:
    """True if ranks are all on different nodes."""
    return len({nodes[rank] for rank in row}) == len(row)


def _even(row: list[int], least: int, most: int) -> list[tuple[int, ...]]:
    """A row in parts as even as can be, of `most` at most, but none smaller than `least`."""
    count = max(1, min(-(-len(row) // most), len(row) // least))
    cuts = [len(row) * i // count for i in range(count + 1)]
    return [tuple(row[a:b]) for a, b in zip(cuts, cuts[1:])]
