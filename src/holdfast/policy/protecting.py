"""The costs of a redundancy scheme on given nodes, and the losses that it bears: for `holdfast
plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.policy.redundancy import groups
from holdfast.policy.survival import Scheme, exponential, fatal_sets, loss, time_to_loss

SNAPSHOTS = 2
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
    """A scheme for ranks on these nodes, with images of so many bytes; `holdings` as for `groups`.

    Nodes fail at a constant rate and are replaced within `repair_s`.  UsageError if the scheme needs more.
    """
    found = groups(nodes, scheme, holdings)
    kept: dict[int, int] = {}
    for group in found:
        k, m = scheme.blocks(len(group))
        largest = max(shares[r] for r in group)
        kept |= {r: -(-largest * m // k) for r in group}
    numbers = {name: i for i, name in enumerate(dict.fromkeys(nodes))}
    names = list(numbers)
    by_node = [0] * len(numbers)
    for rank, node in enumerate(nodes):
        by_node[numbers[node]] += SNAPSHOTS * (shares[rank] + kept[rank])
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
