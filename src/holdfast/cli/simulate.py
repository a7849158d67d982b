"""`holdfast simulate DEVICES ...`: how much of a job's time would train it, by how it is protected."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.screen import AsJson, print_json, say
from holdfast.errors import UsageError
from holdfast.sizes import parse_size

Devices = Annotated[
    list[int], typer.Argument(metavar="DEVICES...", help="Sizes of the job: 10 1000 100000.")
]
Days = Annotated[
    float | None,
    typer.Option("--days", metavar="D", help="Length of the job: 30, or as long as the trace."),
]
Mtbf = Annotated[
    float,
    typer.Option(
        "--device-mtbf-hours", metavar="H", help="Mean time between failures of a device."
    ),
]
Share = Annotated[
    float,
    typer.Option("--node-share", metavar="X", help="Failures that take a node's memory along."),
]
Shape = Annotated[
    float,
    typer.Option("--shape", metavar="K", help="Weibull: below 1 failures come in bursts."),
]
Trace = Annotated[
    str | None,
    typer.Option("--trace", metavar="FILE", help="Failures of the job: a CSV of hours,kind."),
]
Overhead = Annotated[
    float, typer.Option("--overhead", metavar="X", help="What holdfast's saving may take.")
]
Estimate = Annotated[
    bool, typer.Option("--estimate", help="holdfast is not told the rates, it estimates them.")
]
PerNode = Annotated[int, typer.Option("--devices-per-node", metavar="N")]
Step = Annotated[float, typer.Option("--step-s", metavar="S", help="A training step.")]
State = Annotated[str, typer.Option("--state", metavar="BYTES", help="State, per device.")]
Record = Annotated[
    str, typer.Option("--record", metavar="BYTES", help="The record of a step, per device.")
]
NodeStorage = Annotated[
    str, typer.Option("--node-storage", metavar="BYTES", help="To storage per second, per node.")
]
Storage = Annotated[
    str, typer.Option("--storage", metavar="BYTES", help="To storage per second, in all.")
]
Stall = Annotated[float, typer.Option("--stall-s", metavar="S", help="A snapshot holds a step up.")]
RecordStall = Annotated[
    float, typer.Option("--record-stall", metavar="X", help="A record holds a step up, in steps.")
]
Restart = Annotated[
    float, typer.Option("--restart-s", metavar="S", help="From a failure until state is loaded.")
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Of the failures.")]
Plot = Annotated[
    str | None, typer.Option("--plot", metavar="FILE", help="Draw it; needs matplotlib.")
]


def run(
    devices: Devices,
    days: Days = None,
    device_mtbf_hours: Mtbf = 50_000.0,
    node_share: Share = 0.5,
    shape: Shape = 1.0,
    trace: Trace = None,
    overhead: Overhead = 0.03,
    estimate: Estimate = False,
    devices_per_node: PerNode = 8,
    step_s: Step = 5.0,
    state: State = "2GB",
    record: Record = "20MB",
    node_storage: NodeStorage = "2GB",
    storage: Storage = "500GB",
    stall_s: Stall = 0.05,
    record_stall: RecordStall = 0.01,
    restart_s: Restart = 180.0,
    seed: Seed = 0,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a job with failures, protected by holdfast and in other ways."""
    from holdfast.cli import simulated
    from holdfast.policy.cluster import Cluster

    if days is not None and not 0 < days < float("inf"):
        raise UsageError(f"--days {days:g}: must be positive")
    if not 0.1 <= shape <= 10:
        raise UsageError(f"--shape {shape:g}: must be from 0.1 to 10", hint="1 is exponential")
    if seed < 0:
        raise UsageError(f"--seed {seed}: must be 0 or more")
    clusters = [
        Cluster(
            devices=n,
            devices_per_node=devices_per_node,
            device_mtbf_hours=device_mtbf_hours,
            node_share=node_share,
            step_s=step_s,
            state_bytes=parse_size("--state", state),
            record_bytes=parse_size("--record", record),
            node_storage_bytes_per_s=parse_size("--node-storage", node_storage),
            storage_bytes_per_s=parse_size("--storage", storage),
            stall_s=stall_s,
            record_stall=record_stall,
            restart_s=restart_s,
        )
        for n in sorted(set(devices))
    ]
    if plot is not None:
        simulated.figure()  # before the work is done in vain
    told = {"days": days, "shape": shape, "trace": trace, "seed": seed, "overhead": overhead,
            "estimate": estimate}  # fmt: skip
    events = None if trace is None else simulated.read_trace(trace)
    runs = [
        simulated.of(
            cluster, days=days, shape=shape, trace=events, seed=seed, overhead=overhead,
            estimate=estimate,
        )
        for cluster in clusters
    ]  # fmt: skip
    if plot is not None:
        simulated.draw(plot, runs)
    if as_json:
        print_json({"asked": told, **simulated.plain(runs)})
        return
    simulated.show(runs, shape, trace)
    if plot is not None:
        say(f"Drawn: {plot}")


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("simulate")
