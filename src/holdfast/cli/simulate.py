"""`holdfast simulate DEVICES ...`: the share of a job's time that trains it, by the protection it uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from holdfast.base.errors import UsageError
from holdfast.base.sizes import parse_size
from holdfast.cli.options import Argument, Option
from holdfast.cli.screen import Result, say

if TYPE_CHECKING:
    from holdfast.policy.cluster import Cluster

EXAMPLES = (
    "holdfast simulate 64 1024 16384 --days 30",
    "holdfast simulate 1024 --device-mtbf-hours 20000 --state 4GB --plot job.png",
)


def run(
    devices: Annotated[list[int], Argument("DEVICES...", "Sizes of the job: 10 1000 100000.")],
    days: Annotated[
        float | None, Option("Length of the job: 30, or as long as the trace.", "D")
    ] = None,
    device_mtbf_hours: Annotated[
        float, Option("Mean time between failures of a device.", "H")
    ] = 50_000.0,
    node_share: Annotated[float, Option("Share of failures that lose a node's memory.", "X")] = 0.5,
    shape: Annotated[float, Option("Weibull: below 1 failures come in bursts.", "K")] = 1.0,
    trace: Annotated[
        str | None, Option("Failures of the job: a CSV of hours,kind.", "FILE")
    ] = None,
    overhead: Annotated[float, Option("Share of time that saving may take.", "X")] = 0.03,
    estimate: Annotated[bool, Option("Let holdfast estimate the failure rates.")] = False,
    devices_per_node: Annotated[int, Option("", "N")] = 8,
    step_s: Annotated[float, Option("Time of a training step.", "S")] = 5.0,
    state: Annotated[str, Option("State per device.", "BYTES")] = "2GB",
    record: Annotated[str, Option("Record of a step per device.", "BYTES")] = "20MB",
    node_storage: Annotated[
        str, Option("Bandwidth to storage per node and second.", "BYTES")
    ] = "2GB",
    storage: Annotated[str, Option("Bandwidth to storage per second, in all.", "BYTES")] = "500GB",
    stall_s: Annotated[float, Option("Stall of a step by a snapshot.", "S")] = 0.05,
    record_stall: Annotated[float, Option("Stall of a step by a record, in steps.", "X")] = 0.01,
    restart_s: Annotated[
        float, Option("Time from a failure to a loaded state, by a restart.", "S")
    ] = 180.0,
    detect_s: Annotated[float, Option("Time to notice a failure, in place.", "S")] = 15.0,
    enter_s: Annotated[float, Option("Time until ranks can load again, in place.", "S")] = 30.0,
    standby: Annotated[int, Option("Standby nodes that replace lost ones.", "N")] = 1,
    repair_s: Annotated[float, Option("Time to replace a lost node.", "S")] = 600.0,
    seed: Annotated[int, Option("Seed of the failures.", "N")] = 0,
    plot: Annotated[str | None, Option("Draw a chart; needs matplotlib.", "FILE")] = None,
) -> Result:
    """Simulate a job with failures, protected by holdfast and in other ways, restarted and in place."""
    from holdfast.policy.cluster import Cluster

    _check(days=days, shape=shape, seed=seed)
    clusters = [
        Cluster(
            devices=n, devices_per_node=devices_per_node, device_mtbf_hours=device_mtbf_hours,
            node_share=node_share, step_s=step_s, stall_s=stall_s, record_stall=record_stall,
            restart_s=restart_s, detect_s=detect_s, enter_s=enter_s, standby_nodes=standby,
            repair_s=repair_s, state_bytes=parse_size("--state", state),
            record_bytes=parse_size("--record", record),
            node_storage_bytes_per_s=parse_size("--node-storage", node_storage),
            storage_bytes_per_s=parse_size("--storage", storage),
        )
        for n in sorted(set(devices))
    ]  # fmt: skip
    asked = {"days": days, "shape": shape, "trace": trace, "seed": seed, "overhead": overhead,
             "estimate": estimate}  # fmt: skip
    return _simulated(clusters, asked, plot)


def _check(*, days: float | None, shape: float, seed: int) -> None:
    """UsageError for values that cannot be simulated."""
    if days is not None and not 0 < days < float("inf"):
        raise UsageError(f"--days {days:g}: must be positive")
    if not 0.1 <= shape <= 10:
        raise UsageError(f"--shape {shape:g}: must be from 0.1 to 10", hint="1 is exponential")
    if seed < 0:
        raise UsageError(f"--seed {seed}: must be 0 or more")


def _simulated(clusters: list[Cluster], asked: dict[str, Any], plot: str | None) -> Result:
    """Simulate every cluster with the options in `asked`, and draw the chart if a file is given."""
    from holdfast.cli.work import simulated

    if plot is not None:
        simulated.figure()  # fail before the long work
    trace: str | None = asked["trace"]
    events = None if trace is None else simulated.read_trace(trace)
    runs = [simulated.of(cluster, **{**asked, "trace": events}) for cluster in clusters]
    if plot is not None:
        simulated.draw_runs(plot, runs)

    def show() -> None:
        simulated.show_runs(runs, asked["shape"], trace)
        if plot is not None:
            say(f"Drawn: {plot}")

    return Result(lambda: {"asked": asked, **simulated.runs_data(runs)}, show)


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("simulate")
