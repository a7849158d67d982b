"""`holdfast plan URL[@STEP] --mesh dp=4,tp=2`: what each rank would read in a restore on that mesh.

With `--nodes N`: what snapshots in memory would cost on a cluster, and which losses they survive.
With `--rules FILE`: how the rules lay each tensor out over the mesh, and what each rank would store.
"""

from __future__ import annotations

from typing import Annotated

from holdfast.cli.options import Option, ShowAll, TargetArgument
from holdfast.cli.screen import Result

EXAMPLES = (
    "holdfast plan runs/gpt --mesh dp=4,tp=2",
    "holdfast plan runs/gpt --mesh dp=8 --nodes 4 --redundancy parity",
    "holdfast plan runs/gpt --mesh dp=2,tp=4 --rules llama --rank 3",
)
_SCHEMES_HELP = "For --nodes: none, copy, parity, rs(m), recompute."


def run(
    target: TargetArgument,
    mesh: Annotated[str, Option("The new mesh, outermost first: dp=4,tp=2.", "AXES")],
    rules: Annotated[str | None, Option("A file of rules, or a preset.", "FILE")] = None,
    let: Annotated[list[str] | None, Option("A variable of the rules.", "NAME=N")] = None,
    rank: Annotated[int | None, Option("One rank in detail.", "R")] = None,
    nodes: Annotated[
        int | None, Option("Show what snapshots in memory cost and survive.", "N")
    ] = None,
    redundancy: Annotated[str, Option(_SCHEMES_HELP, "SCHEME")] = "auto",
    node_mtbf_hours: Annotated[
        float, Option("Mean time between failures of a node.", "H")
    ] = 8760.0,
    repair_minutes: Annotated[float, Option("Time to replace a lost node.", "M")] = 10.0,
    show_all: ShowAll = False,
) -> Result:
    """Show what each rank of another mesh would read from a step, or store by rules."""
    from holdfast.cli.work import plan

    return plan.run(
        target, mesh, rules=rules, let=let, rank=rank, nodes=nodes, redundancy=redundancy,
        node_mtbf_hours=node_mtbf_hours, repair_minutes=repair_minutes, show_all=show_all,
    )  # fmt: skip


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("plan")
