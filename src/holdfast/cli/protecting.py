"""`holdfast plan ... --nodes N`: what snapshots in memory would cost on a cluster, and what they bear."""

from __future__ import annotations

from typing import Any

from holdfast.cli.screen import dim, heading, many, say, size, table
from holdfast.errors import UsageError
from holdfast.policy.protecting import Protection, protection
from holdfast.policy.redundancy import choose, parse
from holdfast.policy.survival import Scheme, copy, none, rs

HOUR_S = 3600.0
MOST_SETS = 6


def found_for(
    num_nodes: int,
    redundancy: str,
    shares: list[int],
    *,
    mtbf_hours: float,
    repair_minutes: float,
) -> list[Protection]:
    """The scheme that is asked for; with `auto`, every one that these nodes can have."""
    world = len(shares)
    if num_nodes < 1 or world % num_nodes:
        raise UsageError(f"{world} ranks cannot be on {num_nodes} nodes, equally many on each")
    if mtbf_hours <= 0 or repair_minutes <= 0:
        raise UsageError("--node-mtbf-hours and --repair-minutes are positive numbers")
    nodes = [f"node{rank * num_nodes // world}" for rank in range(world)]
    times = {"node_mtbf_s": mtbf_hours * HOUR_S, "repair_s": repair_minutes * 60}
    asked = parse(redundancy)
    if asked is not None:
        return [protection(asked, nodes, shares, **times)]
    schemes: list[Scheme] = [none(), copy(2), rs(1), rs(2)]
    possible = [s for s in schemes if s.losses < num_nodes]
    return [protection(s, nodes, shares, **times) for s in possible]


def show(found: list[Protection], num_nodes: int, mtbf_hours: float, repair_minutes: float) -> None:
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
    columns = (
        "",
        "",
        ">share",
        ">kept for others",
        ">memory of a node",
        "bears",
        ">lost",
        ">once in",
    )
    table(columns, rows)
    say()
    say(
        dim(
            f"lost: that nodes fail fatally within the {repair_minutes:g} min until one is replaced, at "
            f"a mean of {mtbf_hours:g} h between failures of a node. Processes may fail as they like."
        )
    )
    if len(found) == 1 and found[0].fatal:
        sets = [" + ".join(sorted(some)) for some in found[0].fatal[:MOST_SETS]]
        more = len(found[0].fatal) - len(sets)
        say(f"Not borne: {', '.join(sets)}" + (f" and {more:,} more" if more > 0 else ""))


def plain(found: list[Protection]) -> list[dict[str, Any]]:
    """For JSON."""
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
