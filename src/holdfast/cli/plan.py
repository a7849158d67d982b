"""`holdfast plan URL[@STEP] --mesh dp=4,tp=2`: what a restore on that mesh would read, rank by rank.

With `--rules FILE`: how the rules lay each tensor out over the mesh, and what each rank would store.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

from holdfast.checkpoint.opened import Checkpoint
from holdfast.checkpoint.reshaping import Reading, Reshape, parse_mesh, tensor_bytes
from holdfast.cli.options import Option, ShowAll, Target
from holdfast.cli.screen import Result, Row, fields, heading, say, table
from holdfast.cli.targets import opened
from holdfast.cli.words import dim, many, size
from holdfast.errors import UsageError
from holdfast.layout import Mesh

MOST = 16
SCHEMES = "For --nodes: none, copy, parity, rs(m), recompute."


def run(
    target: Target,
    mesh: Annotated[str, Option("The new mesh, outermost first: dp=4,tp=2.", "AXES")],
    rules: Annotated[str | None, Option("A file of rules, or a preset.", "FILE")] = None,
    let: Annotated[list[str] | None, Option("A variable of the rules.", "NAME=N")] = None,
    rank: Annotated[int | None, Option("One rank in detail.", "R")] = None,
    nodes: Annotated[
        int | None, Option("Show what snapshots in memory cost and bear.", "N")
    ] = None,
    redundancy: Annotated[str, Option(SCHEMES, "SCHEME")] = "auto",
    node_mtbf_hours: Annotated[
        float, Option("Mean time between failures of a node.", "H")
    ] = 8760.0,
    repair_minutes: Annotated[float, Option("Until a lost node is replaced.", "M")] = 10.0,
    show_all: ShowAll = False,
) -> Result:
    """Show what each rank of another mesh would read from a step, or store by rules."""
    if rules is not None:
        return _by_rules(target, parse_mesh(mesh), rules, let or [], rank, show_all)
    if let:
        raise UsageError("--let gives values to variables of rules: it needs --rules FILE")
    checkpoint = opened(target)
    reshape = Reshape.onto(checkpoint.manifest, parse_mesh(mesh))
    ranks = [rank] if rank is not None else _ranks(reshape.mesh.world, show_all)
    readings = [reshape.reading(r) for r in ranks]
    data, show_memory = _data(checkpoint, reshape, readings), None
    if nodes is not None:
        from holdfast.cli import protecting

        share = -(-tensor_bytes(reshape) // reshape.mesh.world)  # a save divides evenly
        found = protecting.found_for(
            nodes, redundancy, [share] * reshape.mesh.world, reshape.holdings(),
            mtbf_hours=node_mtbf_hours, repair_minutes=repair_minutes,
        )  # fmt: skip
        data |= {"memory": protecting.data(found)}
        show_memory = partial(
            protecting.show, found, nodes, node_mtbf_hours, repair_minutes, show_all=show_all
        )

    def show() -> None:
        _show_head(checkpoint, reshape)
        if rank is not None:
            _show_rank(reshape, readings[0])
        else:
            _show_ranks(checkpoint, reshape, readings)
        if show_memory is not None:
            show_memory()

    return Result(lambda: data, show)


def _by_rules(
    target: str, mesh: Mesh, file: str, let: list[str], rank: int | None, show_all: bool
) -> Result:
    from holdfast.checkpoint.ruling import Ruling
    from holdfast.cli import ruled
    from holdfast.rules import RuleSet

    rules = RuleSet.load(file, let=ruled.parse_let(let))
    if rank is not None and not 0 <= rank < mesh.world:
        raise UsageError(f"rank {rank} is not in 0..{mesh.world - 1} of mesh {mesh}")
    checkpoint = opened(target)
    plan = Ruling.of(checkpoint.manifest, rules, mesh)
    shares = [plan.share(r) for r in ([rank] if rank is not None else _ranks(mesh.world, show_all))]
    return Result(
        lambda: ruled.data(checkpoint, plan, shares),
        lambda: ruled.show(checkpoint, plan, shares, show_all),
    )


def _ranks(world: int, show_all: bool) -> list[int]:
    if world <= MOST or show_all:
        return list(range(world))
    return [*range(MOST // 2), *range(world - 2, world)]


def _show_head(checkpoint: Checkpoint, reshape: Reshape) -> None:
    foreign = checkpoint.format != "holdfast"
    origin = f"a {checkpoint.format} checkpoint" if foreign else checkpoint.mesh
    say(f"step {checkpoint.step}: from {origin} to {reshape.mesh}", "bold")
    heading("Assumed")
    fields([(f"  {axis}", text) for axis, text in reshape.assumed])


def _show_ranks(checkpoint: Checkpoint, reshape: Reshape, readings: list[Reading]) -> None:
    heading("Read by each rank")
    num_files = len(reshape.manifest.files)
    rows: list[Row] = [
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
    left_out = reshape.mesh.world - len(readings)
    if left_out:
        rows.insert(len(rows) - 2, ("", dim(f"… {left_out:,} more")))
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
        "tensor_bytes": tensor_bytes(reshape),
        "ranks": rows,
    }


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("plan")
