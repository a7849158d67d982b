"""`holdfast plan ... --nodes N`: what snapshots in memory would cost on a cluster, and what they bear."""

from __future__ import annotations

import math
from typing import Any

from holdfast.cli.screen import Row, heading, say, table
from holdfast.cli.words import dim, many, ranks_text, size
from holdfast.errors import UsageError
from holdfast.policy.protecting import Protection, protection
from holdfast.policy.redundancy import choose, parse
from holdfast.policy.survival import Scheme, copy, none, rs

HOUR_S = 3600.0
MOST_SETS = 6
MOST_GROUPS = 8
COLUMNS = ("", "", ">share", ">kept for others", ">memory of a node", "bears", ">lost", ">once in")
LOST = (
    "lost: that nodes fail fatally within the {:g} min until one is replaced, at a mean of {:g} h "
    "between failures of a node. Processes may fail as they like."
)


def found_for(
    num_nodes: int,
    redundancy: str,
    shares: list[int],
    holdings: list[int],
    *,
    mtbf_hours: float,
    repair_minutes: float,
) -> list[Protection]:
    """The scheme that is asked for; with `auto`, every one that these nodes can have."""
    world = len(shares)
    if num_nodes < 1 or world % num_nodes:
        raise UsageError(f"{world} ranks cannot be on {num_nodes} nodes, equally many on each")
    if not (0 < mtbf_hours < math.inf and 0 < repair_minutes < math.inf):
        raise UsageError("--node-mtbf-hours and --repair-minutes are positive numbers")
    nodes = [f"node{rank * num_nodes // world}" for rank in range(world)]
    times = {"node_mtbf_s": mtbf_hours * HOUR_S, "repair_s": repair_minutes * 60}
    asked = parse(redundancy)
    if asked is not None:
        return [protection(asked, nodes, shares, holdings, **times)]
    schemes: list[Scheme] = [none(), copy(2), rs(1), rs(2)]
    possible = [s for s in schemes if s.losses < num_nodes]
    return [protection(s, nodes, shares, holdings, **times) for s in possible]


def show(
    found: list[Protection],
    num_nodes: int,
    mtbf_hours: float,
    repair_minutes: float,
    *,
    show_all: bool,
) -> None:
    heading(f"Snapshots in memory on {many(num_nodes, 'node')}")
    auto = str(choose(num_nodes))
    rows = [
        (
            str(p.scheme) + (" (auto)" if len(found) > 1 and str(p.scheme) == auto else ""),
            many(len(p.groups), "group") + f" of {max(map(len, p.groups))}",
            size(p.share_bytes),
            size(p.kept_bytes),
            size(p.node_bytes),
            "nothing" if not p.bears else f"any {many(p.bears, 'node')}",
            _probability(p.loss),
            _time(p.time_to_loss_s),
        )
        for p in found
    ]
    table(COLUMNS, rows)
    say()
    say(dim(LOST.format(repair_minutes, mtbf_hours)))
    if len(found) == 1 and found[0].fatal:
        sets = [" + ".join(sorted(some)) for some in found[0].fatal[:MOST_SETS]]
        more = len(found[0].fatal) - len(sets)
        say(f"Not borne: {', '.join(sets)}" + (f" and {more:,} more" if more > 0 else ""))
    for p in found:
        if p.scheme.losses and (len(found) == 1 or str(p.scheme) == auto):
            _show_groups(p, show_all)


def _show_groups(p: Protection, show_all: bool) -> None:
    """Show who keeps whose snapshots: group by group, and node by node."""
    heading(f"Who keeps whose: {p.scheme}")
    most = len(p.nodes) if show_all else MOST_GROUPS
    apart = all(len({p.nodes[r] for r in group}) == len(group) for group in p.groups)
    rows: list[Row] = [
        (f"group {i}", ", ".join(f"{r} on {p.nodes[r]}" for r in group))
        for i, group in enumerate(p.groups[:most])
    ]
    table(("", "ranks"), rows + _left_out(len(p.groups) - most))
    say()
    nodes: dict[str, list[int]] = {}
    for rank, node in enumerate(p.nodes):
        nodes.setdefault(node, []).append(rank)
    group_of = {rank: i for i, group in enumerate(p.groups) for rank in group}
    rows = [
        (name, ranks_text(ranks), ", ".join(str(group_of[r]) for r in ranks))
        for name, ranks in list(nodes.items())[:most]
    ]
    table(("", "ranks", "member of groups"), rows + _left_out(len(nodes) - most))
    say()
    say(dim(_what_is_kept(p.scheme) + ("" if apart else " All are on one node: it mends damage.")))


def _left_out(count: int) -> list[Row]:
    return [(dim(f"… {count:,} more"),)] if count > 0 else []


def _what_is_kept(scheme: Scheme) -> str:
    if scheme.kind == "copy":
        before = "the member" if scheme.losses == 1 else f"the {scheme.losses} members"
        return f"Each member keeps copies of the images of {before} before it in its group."
    blocks = "a block" if scheme.losses == 1 else f"{scheme.losses} blocks"
    return f"Each member keeps {blocks} of parity over the images of the others of its group."


def data(found: list[Protection]) -> list[dict[str, Any]]:
    """Return what was found, for JSON."""
    return [
        {
            "scheme": str(p.scheme),
            "groups": [list(g) for g in p.groups],
            "share_bytes": p.share_bytes,
            "kept_bytes": p.kept_bytes,
            "node_bytes": p.node_bytes,
            "bears_nodes": p.bears,
            "fatal_sets": [sorted(some) for some in p.fatal],
            "loss": p.loss,
            "time_to_loss_s": p.time_to_loss_s if p.time_to_loss_s != float("inf") else None,
        }
        for p in found
    ]


def _probability(p: float) -> str:
    return "never" if p == 0 else f"{p:.2g}" if p < 0.01 else f"{100 * p:.1f} %"


def _time(seconds: float) -> str:
    for unit, length in (("years", 365.25 * 86400), ("days", 86400), ("h", 3600)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.0f} {unit}" if seconds < 1e15 else "10 M years and more"
    return f"{seconds / 60:.0f} min"
