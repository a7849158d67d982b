"""`holdfast plan URL[@STEP] --mesh dp=4,tp=2`: what each rank would read in a restore on that mesh.

With `--nodes N`: what snapshots in memory would cost on a cluster, and which losses they survive.
With `--rules FILE`: how the rules lay each tensor out over the mesh, and what each rank would store.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from holdfast.base.errors import UsageError
from holdfast.base.text import listed
from holdfast.cli.screen import Result, TableRow, fields, heading, say, table
from holdfast.cli.words import and_more, dim, many, ranks_text, size
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.reshaping import Reading, Reshape, parse_mesh, total_tensor_bytes
from holdfast.core.layout import Mesh
from holdfast.formats.looking import open as open_checkpoint
from holdfast.policy.redundancy import Protection, choose, parse, protection
from holdfast.policy.survival import Scheme, copy, none, rs

_MOST_RANKS = 16


def run(
    target: str,
    mesh: str,
    *,
    rules: str | None,
    let: list[str] | None,
    rank: int | None,
    nodes: int | None,
    redundancy: str,
    node_mtbf_hours: float,
    repair_minutes: float,
    show_all: bool,
) -> Result:
    """See `holdfast.cli.verbs`."""
    if rules is not None:
        if nodes is not None:
            raise UsageError("--nodes asks for snapshots in memory, --rules for files: give one")
        return _by_rules(target, parse_mesh(mesh), rules, let or [], rank, show_all)
    if let:
        raise UsageError("--let gives values to variables of rules: it needs --rules FILE")
    checkpoint = open_checkpoint(target)
    reshape = Reshape.onto(checkpoint.manifest, parse_mesh(mesh))
    ranks = [rank] if rank is not None else _ranks(reshape.mesh.world, show_all)
    readings = [reshape.reading(r) for r in ranks]
    data, found = _data(checkpoint, reshape, readings), None
    if nodes is not None:
        share = -(-total_tensor_bytes(reshape) // reshape.mesh.world)  # a save divides evenly
        found = found_for(
            nodes, redundancy, [share] * reshape.mesh.world, reshape.holdings(),
            mtbf_hours=node_mtbf_hours, repair_minutes=repair_minutes,
        )  # fmt: skip
        data |= {"memory": _protection_data(found)}

    def show() -> None:
        _show_head(checkpoint, reshape)
        if rank is not None:
            _show_rank(reshape, readings[0])
        else:
            _show_ranks(checkpoint, reshape, readings)
        if nodes is not None and found is not None:
            _show_protection(found, nodes, node_mtbf_hours, repair_minutes, show_all=show_all)

    return Result(lambda: data, show)


def _by_rules(
    target: str, mesh: Mesh, file: str, let: list[str], rank: int | None, show_all: bool
) -> Result:
    from holdfast.cli import ruled
    from holdfast.formats.rules import RuleSet
    from holdfast.formats.rules.rule_plan import RulePlan

    rules = RuleSet.load(file, let=ruled.parse_let(let))
    if rank is not None and not 0 <= rank < mesh.world:
        raise UsageError(f"rank {rank} is not in 0..{mesh.world - 1} of mesh {mesh}")
    checkpoint = open_checkpoint(target)
    plan = RulePlan.of(checkpoint.manifest, rules, mesh)
    shares = [plan.share(r) for r in ([rank] if rank is not None else _ranks(mesh.world, show_all))]
    return Result(
        lambda: ruled.plan_data(checkpoint, plan, shares),
        lambda: ruled.show_plan(checkpoint, plan, shares, show_all),
    )


def _ranks(world: int, show_all: bool) -> list[int]:
    if world <= _MOST_RANKS or show_all:
        return list(range(world))
    return [*range(_MOST_RANKS // 2), *range(world - 2, world)]


def _show_head(checkpoint: Checkpoint, reshape: Reshape) -> None:
    foreign = checkpoint.format != "holdfast"
    origin = f"a {checkpoint.format} checkpoint" if foreign else checkpoint.mesh
    say(f"step {checkpoint.step}: from {origin} to {reshape.mesh}", "bold")
    heading("Assumed")
    fields([(f"  {axis}", text) for axis, text in reshape.assumed])


def _show_ranks(checkpoint: Checkpoint, reshape: Reshape, readings: list[Reading]) -> None:
    heading("Read by each rank")
    num_files = len(reshape.manifest.files)
    rows: list[TableRow] = [
        (
            str(r.rank),
            coordinates(reshape.mesh, r.rank),
            r.num_tensors,
            size(r.wanted_bytes),
            f"{len(r.by_file):,} of {num_files:,}",
            size(r.file_bytes),
        )
        for r in readings
    ]
    others = reshape.mesh.world - len(readings)
    if others:
        rows.insert(len(rows) - 2, ("", and_more(others, how="")))
    noun = "files" if checkpoint.format == "holdfast" else "parts"
    columns = (">rank", "at", ">tensors", ">wanted", f">{noun} touched", ">size of those")
    table(columns, rows)
    total = total_tensor_bytes(reshape)
    most = max(r.wanted_bytes for r in readings)
    say()
    say(f"The step holds {size(total)} of tensors; a rank wants at most {size(most)} of it.")
    if others:
        say(dim("--rank R shows one rank, --all every rank."))


def _show_rank(reshape: Reshape, reading: Reading) -> None:
    heading(f"Rank {reading.rank}")
    fields(
        [
            ("  at", coordinates(reshape.mesh, reading.rank)),
            ("  wants", f"{size(reading.wanted_bytes)} of {many(reading.num_tensors, 'tensor')}"),
            ("  of which", ", ".join(f"{k} {size(v)}" for k, v in reading.by_state.items()) or "-"),
            ("  touches", f"{many(len(reading.by_file), 'file')} of {size(reading.file_bytes)}"),
        ]
    )
    heading("Wanted of each file")
    files = reshape.manifest.file_of
    rows = [
        (files[r].path, size(n), size(files[r].bytes), f"{100 * n / files[r].bytes:.0f} %")
        for r, n in sorted(reading.by_file.items())
    ]
    table(("file", ">wanted", ">of", ""), rows)


def coordinates(mesh: Mesh, rank: int) -> str:
    return ", ".join(f"{axis} {mesh.coordinate(rank, axis)}" for axis in mesh.sizes)


def _data(checkpoint: Checkpoint, reshape: Reshape, readings: list[Reading]) -> dict[str, Any]:
    files = reshape.manifest.file_of
    rows = [
        asdict(reading) | {"by_file": {files[r].path: n for r, n in reading.by_file.items()}}
        for reading in readings
    ]
    return {
        "url": checkpoint.store.url,
        "step": checkpoint.step,
        "saved_mesh": dict(reshape.manifest.mesh),
        "mesh": dict(reshape.mesh.axes),
        "assumed": dict(reshape.assumed),
        "tensor_bytes": total_tensor_bytes(reshape),
        "ranks": rows,
    }


# -- snapshots in memory --------------------------------------------------------------------------


_HOUR_S = 3600.0
_MOST_SETS = 6
_MOST_GROUPS = 8
_COLUMNS = ("", "", ">share", ">kept for others", ">memory of a node", "bears", ">lost", ">once in")
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
    """Return the scheme that is asked for; with `auto`, every scheme that these nodes can have."""
    world = len(shares)
    if num_nodes < 1 or world % num_nodes:
        raise UsageError(f"{world} ranks cannot be divided equally among {num_nodes} nodes")
    if not (0 < mtbf_hours < math.inf and 0 < repair_minutes < math.inf):
        raise UsageError("--node-mtbf-hours and --repair-minutes are positive numbers")
    nodes = [f"node{rank * num_nodes // world}" for rank in range(world)]
    times = {"node_mtbf_s": mtbf_hours * _HOUR_S, "repair_s": repair_minutes * 60}
    asked = parse(redundancy)
    if asked is not None:
        return [protection(asked, nodes, shares, holdings, **times)]
    schemes: list[Scheme] = [none(), copy(2), rs(1), rs(2)]
    possible = [s for s in schemes if s.losses < num_nodes]
    return [protection(s, nodes, shares, holdings, **times) for s in possible]


def _show_protection(
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
    table(_COLUMNS, rows)
    say()
    say(dim(LOST.format(repair_minutes, mtbf_hours)))
    if len(found) == 1 and found[0].fatal:
        sets = (" + ".join(sorted(some)) for some in found[0].fatal)
        say(f"Not borne: {listed(sets, _MOST_SETS)}")
    for p in found:
        if p.scheme.losses and (len(found) == 1 or str(p.scheme) == auto):
            _show_groups(p, show_all)


def _show_groups(p: Protection, show_all: bool) -> None:
    """Show which ranks protect each other's snapshots: by group, and by node."""
    heading(f"Who keeps whose: {p.scheme}")
    most = len(p.nodes) if show_all else _MOST_GROUPS
    apart = all(len({p.nodes[r] for r in group}) == len(group) for group in p.groups)
    rows: list[TableRow] = [
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
    say(
        dim(_what_is_kept(p.scheme) + ("" if apart else " All are on one node: it repairs damage."))
    )


def _left_out(count: int) -> list[TableRow]:
    return [(and_more(count, how=""),)] if count > 0 else []


def _what_is_kept(scheme: Scheme) -> str:
    if scheme.kind == "copy":
        before = "the member" if scheme.losses == 1 else f"the {scheme.losses} members"
        return f"Each member keeps copies of the images of {before} before it in its group."
    blocks = "a block" if scheme.losses == 1 else f"{scheme.losses} blocks"
    return f"Each member keeps {blocks} of parity over the images of the others of its group."


def _protection_data(found: list[Protection]) -> list[dict[str, Any]]:
    """Return the schemes, for JSON."""
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


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("plan")
