"""`holdfast plan URL[@STEP] --mesh dp=4,tp=2`: what a restore on that mesh would read, rank by rank.

With `--rules FILE`: how the rules lay each tensor out over the mesh, and what each rank would store.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from holdfast.checkpoint.opened import Checkpoint
from holdfast.checkpoint.reshaping import Reading, Reshape, parse_mesh, tensor_bytes
from holdfast.cli.screen import (
    AsJson,
    ShowAll,
    Target,
    dim,
    fields,
    heading,
    many,
    opened,
    print_json,
    say,
    size,
    table,
)
from holdfast.errors import UsageError

MeshText = Annotated[
    str, typer.Option("--mesh", metavar="AXES", help="The new mesh, outermost first: dp=4,tp=2.")
]
RulesFile = Annotated[
    str | None, typer.Option("--rules", metavar="FILE", help="A file of rules, or a preset.")
]
LetText = Annotated[
    list[str] | None, typer.Option("--let", metavar="NAME=N", help="A variable of the rules.")
]
Nodes = Annotated[
    int | None,
    typer.Option("--nodes", metavar="N", help="Show what snapshots in memory cost and bear."),
]
Redundancy = Annotated[
    str,
    typer.Option(
        "--redundancy", metavar="SCHEME", help="For --nodes: none, copy, parity, rs(m), recompute."
    ),
]
Mtbf = Annotated[
    float,
    typer.Option("--node-mtbf-hours", metavar="H", help="Mean time between failures of a node."),
]
Repair = Annotated[
    float, typer.Option("--repair-minutes", metavar="M", help="Until a lost node is replaced.")
]
Rank = Annotated[int | None, typer.Option("--rank", metavar="R", help="One rank in detail.")]
MOST = 16


def run(
    target: Target,
    mesh: MeshText,
    rules: RulesFile = None,
    let: LetText = None,
    rank: Rank = None,
    nodes: Nodes = None,
    redundancy: Redundancy = "auto",
    node_mtbf_hours: Mtbf = 8760.0,
    repair_minutes: Repair = 10.0,
    show_all: ShowAll = False,
    as_json: AsJson = False,
) -> None:
    """Show what each rank of another mesh would read from a step, or store by rules."""
    if rules is not None:
        _by_rules(target, mesh, rules, let or [], rank, show_all, as_json)
        return
    if let:
        raise UsageError("--let gives values to variables of rules: it needs --rules FILE")
    checkpoint = opened(target)
    reshape = Reshape.onto(checkpoint.manifest, parse_mesh(mesh))
    ranks = [rank] if rank is not None else _ranks(reshape.mesh.world, show_all)
    readings = [reshape.reading(r) for r in ranks]
    found = []
    if nodes is not None:
        from holdfast.cli import protecting

        share = -(-tensor_bytes(reshape) // reshape.mesh.world)  # a save divides evenly
        found = protecting.found_for(
            nodes, redundancy, [share] * reshape.mesh.world, reshape.holdings(),
            mtbf_hours=node_mtbf_hours, repair_minutes=repair_minutes,
        )  # fmt: skip
    if as_json:
        memory = {"memory": protecting.plain(found)} if found else {}
        print_json(_plain(checkpoint, reshape, readings) | memory)
        return
    _show_head(checkpoint, reshape)
    if rank is not None:
        _show_rank(reshape, readings[0])
    else:
        _show_ranks(checkpoint, reshape, readings)
    if nodes is not None:
        protecting.show(found, nodes, node_mtbf_hours, repair_minutes, show_all=show_all)


def _by_rules(
    target: str,
    mesh_text: str,
    file: str,
    let: list[str],
    rank: int | None,
    show_all: bool,
    as_json: bool,
) -> None:
    from holdfast.checkpoint.ruling import Ruling
    from holdfast.cli.ruled import parse_let, plain, show
    from holdfast.rules import RuleSet

    mesh, rules = parse_mesh(mesh_text), RuleSet.load(file, let=parse_let(let))
    if rank is not None and not 0 <= rank < mesh.world:
        raise UsageError(f"rank {rank} is not in 0..{mesh.world - 1} of mesh {mesh}")
    checkpoint = opened(target)
    plan = Ruling.of(checkpoint.manifest, rules, mesh)
    shares = [plan.share(r) for r in ([rank] if rank is not None else _ranks(mesh.world, show_all))]
    if as_json:
        print_json(plain(checkpoint, plan, shares))
    else:
        show(checkpoint, plan, shares, show_all)


def _ranks(world: int, show_all: bool) -> list[int]:
    if world <= MOST or show_all:
        return list(range(world))
    return [*range(MOST // 2), *range(world - 2, world)]


def _show_head(checkpoint: Checkpoint, reshape: Reshape) -> None:
    foreign = checkpoint.format != "holdfast"
    origin = f"a {checkpoint.format} checkpoint" if foreign else checkpoint.mesh
    say(f"step {checkpoint.step}: from {origin} to {reshape.mesh}", style="bold")
    heading("Assumed")
    fields([(f"  {axis}", text) for axis, text in reshape.assumed])


def _show_ranks(checkpoint: Checkpoint, reshape: Reshape, readings: list[Reading]) -> None:
    heading("Read by each rank")
    rows = [
        (
            str(r.rank),
            _coordinates(reshape, r.rank),
            f"{r.num_tensors:,}",
            size(r.wanted_bytes),
            f"{len(r.by_file):,} of {len(reshape.manifest.files):,}",
            size(r.file_bytes),
        )
        for r in readings
    ]
    left_out = reshape.mesh.world - len(readings)
    if left_out:
        more = dim(f"… {left_out:,} more")
        rows.insert(len(rows) - 2, ("", more, "", "", "", ""))
    noun = "files" if checkpoint.format == "holdfast" else "parts"
    columns = (">rank", "at", ">tensors", ">wanted", f">{noun} touched", ">size of those")
    table(columns, rows)
    total = tensor_bytes(reshape)
    most = max(r.wanted_bytes for r in readings)
    say()
    say(f"The step holds {size(total)} of tensors; a rank wants at most {size(most)} of it.")
    if left_out:
        say(dim("--rank R shows any one rank, --all every one."))


def _show_rank(reshape: Reshape, reading: Reading) -> None:
    heading(f"Rank {reading.rank}")
    fields(
        [
            ("  at", _coordinates(reshape, reading.rank)),
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


def _coordinates(reshape: Reshape, rank: int) -> str:
    return ", ".join(f"{a} {reshape.mesh.coordinate(rank, a)}" for a in reshape.mesh.sizes)


def _plain(checkpoint: Checkpoint, reshape: Reshape, readings: list[Reading]) -> dict[str, Any]:
    files = reshape.manifest.file_of
    rows = []
    for reading in readings:
        row = asdict(reading)
        row["by_file"] = {files[r].path: n for r, n in reading.by_file.items()}
        rows.append(row)
    return {
        "url": checkpoint.store.url,
        "step": checkpoint.step,
        "saved_mesh": dict(reshape.manifest.mesh),
        "mesh": dict(reshape.mesh.axes),
        "assumed": dict(reshape.assumed),
        "tensor_bytes": tensor_bytes(reshape),
        "ranks": rows,
    }


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("plan")
