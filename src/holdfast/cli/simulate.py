"""`holdfast simulate DEVICES ...`: the share of a job's time that trains it, by the protection it uses."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.base.errors import UsageError
from holdfast.cli.screen import Result, TableRow, fields, heading, say, say_lines, table
from holdfast.cli.words import size
from holdfast.policy.cluster import HOUR_S, Cluster, at_random, from_trace
from holdfast.policy.simulate import Outcome, simulate, strategies
from holdfast.policy.tuning import Auto

_DAY_S = 86400.0
_DAYS = 30.0
_COLUMNS = (">devices", ">failures", "", ">effective", ">saving", ">lost", ">recovering", ">on fewer",
           ">at each: steps", ">seconds", "steps between")  # fmt: skip
LEGEND = """\
effective: share of the time for steps that were kept. lost: for steps trained in vain. on fewer: extra
time of steps on fewer nodes. at each: steps lost by a failure, and seconds until training went on."""
ASSUMED = (
    ("step", "{step_s:g} s"),
    ("state", "{state} of each device, however large the job; replicas are not counted"),
    ("record", "{record} of each device and step, {part:.2g} % of the state"),
    ("nodes", "{devices_per_node} devices each; a device sends {host}/s to its host, {network}/s on"),
    ("storage", "{node_storage}/s per node, {storage}/s in all, reading as writing"),
    ("a save", "stalls training for {stall_s:g} s, plus the part of the copy that exceeds a step;"),
    ("", "with `async` for the copy, with `checkpoint` until it is committed"),
    ("a record", "stalls training for {record_stall:.3g} of a step; its replay takes {replay:.3g}"),
    ("a batch", "of records takes {commit_s:g} s besides its bytes"),
    ("a restart", "{restart_s:g} s, besides loading and replay"),
    ("in place", "{detect_s:g} s until survivors know, {enter_s:g} s until all have entered again"),
    ("standby", "nodes: {standby_nodes}, to replace lost nodes"),
    ("a lost node", "is replaced in {repair_s:g} s; until then its group survives no other loss"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Simulated:
    """A size of the job, and its outcome for each strategy."""

    cluster: Cluster
    wall_s: float
    outcomes: dict[str, Outcome]


def check(*, days: float | None, shape: float, seed: int) -> None:
    """UsageError for values that cannot be simulated."""
    if days is not None and not 0 < days < float("inf"):
        raise UsageError(f"--days {days:g}: must be positive")
    if not 0.1 <= shape <= 10:
        raise UsageError(f"--shape {shape:g}: must be from 0.1 to 10", hint="1 is exponential")
    if seed < 0:
        raise UsageError(f"--seed {seed}: must be 0 or more")


def run(clusters: list[Cluster], asked: dict[str, Any], plot: str | None) -> Result:
    """Simulate every cluster with the options in `asked`, and draw the chart if a file is given."""
    if plot is not None:
        figure()  # fail before the long work
    trace: str | None = asked["trace"]
    events = None if trace is None else read_trace(trace)
    runs = [of(cluster, **{**asked, "trace": events}) for cluster in clusters]
    if plot is not None:
        draw_runs(plot, runs)

    def show() -> None:
        show_runs(runs, asked["shape"], trace)
        if plot is not None:
            say(f"Drawn: {plot}")

    return Result(lambda: {"asked": asked, **runs_data(runs)}, show)


def read_trace(path: str) -> tuple[str, str]:
    """Return (name, text) of a trace."""
    try:
        return path, Path(path).read_text()
    except OSError as error:
        raise UsageError(f"cannot read the trace {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"the trace {path} is not a text file") from None


def of(
    cluster: Cluster,
    *,
    days: float | None,
    shape: float,
    trace: tuple[str, str] | None,
    seed: int,
    overhead: float,
    estimate: bool,
) -> Simulated:
    """Simulate all strategies through the same failures."""
    rng = np.random.default_rng(seed)
    wall_s = (days or _DAYS) * _DAY_S
    if trace is None:
        failures = at_random(
            rng, mtbf_s=cluster.mtbf_s, until_s=wall_s, num_nodes=cluster.num_nodes,
            node_share=cluster.node_share, shape=shape,
        )  # fmt: skip
    else:
        failures = from_trace(*trace, rng, cluster.num_nodes)
        if days is None:
            wall_s = max((f.time_s for f in failures), default=0.0) + HOUR_S
        failures = [f for f in failures if f.time_s < wall_s]
        if not failures:
            raise UsageError(f"{trace[0]} has no failure in the simulated time")
        cluster = replace(
            cluster,
            device_mtbf_hours=wall_s / HOUR_S / len(failures) * cluster.devices,
            node_share=sum(f.node is not None for f in failures) / len(failures),
        )
    auto = Auto(mtbf_hours=None if estimate else cluster.mtbf_s / HOUR_S, overhead=overhead,
                node_share=cluster.node_share)  # fmt: skip
    outcomes = {s.name: simulate(s, cluster, failures, wall_s) for s in strategies(cluster, auto)}
    return Simulated(cluster, wall_s, outcomes)


def show_runs(runs: list[Simulated], shape: float, trace: str | None) -> None:
    heading("Assumed")
    c = runs[0].cluster
    sizes: dict[str, str | float] = {
        "state": size(c.state_bytes),
        "part": 100 * c.record_bytes / c.state_bytes,
        "record": size(c.record_bytes),
        "host": size(c.host_bytes_per_s),
        "network": size(c.network_bytes_per_s),
        "node_storage": size(c.node_storage_bytes_per_s),
        "storage": size(c.storage_bytes_per_s),
    }
    assumed = [(f"  {name}", text.format(**asdict(c), **sizes)) for name, text in ASSUMED]
    how = f"Weibull of shape {shape:g}" if shape != 1 else "exponential"
    of_them = f"{c.node_share:.0%} of them lose a node's memory"
    failures = f"one in {c.device_mtbf_hours:,.0f} h of a device, {how}; {of_them}"
    fields([("  failures", f"as in {trace}; {of_them}" if trace else failures), *assumed])
    heading(f"{runs[0].wall_s / _DAY_S:.3g} days")
    table(_COLUMNS, [row for run in runs for row in _rows(run)])
    say()
    say_lines(LEGEND, "dim")


def _rows(run: Simulated) -> list[TableRow]:
    rows: list[TableRow] = []
    for name, o in run.outcomes.items():
        first = not rows
        rows.append(
            (
                run.cluster.devices if first else "",
                o.failures if first else "",
                name,
                _percent(o.effective),
                _percent(o.saving_s / o.wall_s),
                _percent(o.lost_s / o.wall_s),
                _percent(o.recovering_s / o.wall_s),
                _percent(o.fewer_s / o.wall_s),
                f"{o.lost_steps / o.failures:,.1f}" if o.failures else "-",
                f"{o.recovering_s / o.failures:,.0f}" if o.failures else "-",
                str(o.frequencies),
            )
        )
    return rows


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def runs_data(runs: list[Simulated]) -> dict[str, Any]:
    """Return the runs, for JSON."""
    found = []
    for run in runs:
        for name, o in run.outcomes.items():
            row = {"devices": run.cluster.devices, "strategy": name, "effective": o.effective}
            row |= asdict(o) | {"changes": [str(change) for change in o.changes]}
            found.append(row)
    return {"assumed": [asdict(run.cluster) for run in runs], "runs": found}


def figure() -> Any:
    """Return an empty chart.  UsageError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            "--plot needs matplotlib, which is not installed", hint="pip install matplotlib"
        ) from None
    return Figure(figsize=(8, 4.5), layout="constrained")


def draw_runs(path: str, runs: list[Simulated]) -> None:
    """Draw effective training time over the size of the job; overlapping lines stay visible."""
    drawn = figure()
    axes = drawn.subplots()
    sizes = [run.cluster.devices for run in runs]
    names = list(runs[0].outcomes)
    for width, name in zip(range(len(names), 0, -1), names):
        share = [100 * run.outcomes[name].effective for run in runs]
        axes.plot(sizes, share, marker="o", linewidth=width, markersize=2 * width + 2, label=name)
    axes.set_xscale("log")
    axes.set(xlabel="devices", ylabel="effective training time, %")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        drawn.savefig(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {path}: {error}") from None


if __name__ == "__main__":
    from holdfast.cli.main import main

    main("simulate")
