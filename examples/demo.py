"""The demo: a training run that is killed in mid-save, then moved to other layouts twice, and loses nothing.

    python examples/demo.py          # two to three minutes on two cores; writes demo-out/

Phase 0 trains without interruption, for reference. Phase 1 trains the same on the same layout, but one of its four
ranks is killed while a checkpoint is being written. Phases 2 and 3 carry its run on with two processes and with one.
Then everything is compared; the exit status is 1 if any comparison fails.
"""

import shutil
import signal
import sys
import time
from pathlib import Path

import matplotlib
from compare import Verdict, against_reference, across_layouts
from launch import Assassin, Failed, Phase, Record, Run
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  the backend must be chosen first

OUT = Path("demo-out")
HORIZON, EVERY = 100, 10  # steps in all, and between checkpoints
REFERENCE = Phase("0-reference", OUT / "reference", dp=2, tp=2, until=HORIZON)
KILLED = Phase("1-killed", OUT / "run", dp=2, tp=2, until=50)
FEWER = Phase("2-two-processes", OUT / "run", dp=2, tp=1, until=80)
ALONE = Phase("3-one-process", OUT / "run", dp=1, tp=1, until=HORIZON)

console = Console(highlight=False)
began = time.monotonic()


def say(text: str) -> None:
    console.print(f"[dim]{time.monotonic() - began:6.1f} s[/]  {text}")


def tell(phase: Phase, record: Record) -> None:
    """One line per start and per checkpoint interval."""
    if record["event"] == "start":
        origin = f"restored step [bold]{record['restored_from']}[/]" if record["restored_from"] else "from scratch"
        say(f"{len(record['pids'])} process(es) up, {origin}")
    elif record["step"] % EVERY == 0:
        say(f"step {record['step']:3d} of {phase.until}   loss {record['loss']:.4f}")


def carry_out(phase: Phase, assassin: Assassin | None = None) -> Run:
    """Run a phase to its end, and say what happens."""
    console.rule(f"[bold]phase {phase.name}[/]: {phase.dp * phase.tp} process(es), parallelism: {phase.layout}", align="left")
    with Run(phase, OUT, horizon=HORIZON, every=EVERY) as run, console.status("starting") as status:
        alive = True
        while alive:
            alive = run.alive()  # asked first: what is read after the end is everything
            for record in run.new_records():
                tell(phase, record)
                status.update(f"step {record.get('step', record['restored_from'])} of {phase.until}")
            if assassin and assassin.look(run.pids()):
                say(f"[red]SIGKILL to rank {assassin.rank}[/], while step {assassin.step} is half saved; torchrun restarts all")
            time.sleep(0.001 if assassin and assassin.step is None else 0.05)
    return run


def check_kill(run: Run, assassin: Assassin) -> None:
    """The story must be true: a rank was killed, and the step that was being saved did not come to exist by it."""
    if assassin.step is None:
        raise Failed("no save could be caught half done; run the demo again")
    if len(run.starts()) < 2:
        raise Failed(f"rank {assassin.rank} was killed, but torchrun did not restart the run\n{run.tail()}")
    origin = run.starts()[1]["restored_from"]
    if origin == assassin.step:
        say(f"step {origin} was complete in the very moment of the kill, so nothing was lost")
    else:
        say(f"half-saved step {assassin.step} was not used; steps {origin + 1} to {assassin.step} were done again")


def table(runs: list[Run], verdicts: list[Verdict]) -> Table:
    result = Table(title="what was compared", title_justify="left")
    for column in ("phase", "parallelism", "steps", "restored from", "verdict", "tensors compared", "max loss difference"):
        result.add_column(column)
    for run, verdict in zip(runs, verdicts):
        first = run.starts()[0]["restored_from"]
        origins = ", then ".join(str(start["restored_from"]) for start in run.starts() if start["restored_from"]) or "-"
        colour = "red" if verdict.problems else "green"
        cells = (f"{first} to {run.phase.until}", origins, f"[{colour}]{verdict.text}[/]", str(verdict.num_tensors))
        result.add_row(run.phase.name, run.phase.layout, *cells, f"{verdict.loss_difference:.1e}")
    return result


def draw(reference: Run, runs: list[Run], path: Path) -> None:
    """Losses over the reference, and below them how far they are from it."""
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(9, 6), height_ratios=(3, 1), layout="constrained")
    expected = dict(reference.losses())
    above.plot(*zip(*expected.items()), color="0.8", linewidth=6, label="uninterrupted: FSDP2 x2, TP x2")
    for run in runs:
        steps, losses = zip(*run.losses())
        above.plot(steps, losses, label=f"{run.phase.name}: {run.phase.layout}")
        below.plot(steps, [abs(loss - expected[step]) for step, loss in zip(steps, losses)], ".")
        above.axvline(run.starts()[-1]["restored_from"], color="0.5", linestyle=":", linewidth=1)
    above.set(ylabel="loss", title="killed in mid-save, then moved to two other layouts (dotted: restored)")
    above.legend()
    below.set(xlabel="step", ylabel="difference")
    below.set_yscale("symlog", linthresh=1e-7)
    figure.savefig(path, dpi=120)


def play() -> int:
    """All phases, then the comparisons; the exit status."""
    reference = carry_out(REFERENCE)
    assassin = Assassin(KILLED.root, patience=2 * EVERY)
    killed = carry_out(KILLED, assassin)
    check_kill(killed, assassin)
    fewer, alone = carry_out(FEWER), carry_out(ALONE)
    console.rule("[bold]comparing[/]", align="left")
    verdicts = [
        against_reference(killed, reference),
        across_layouts(fewer, killed, reference),
        across_layouts(alone, fewer, reference),
    ]
    console.print(table([killed, fewer, alone], verdicts))
    draw(reference, [killed, fewer, alone], OUT / "loss.png")
    say(f"loss curves: {OUT / 'loss.png'}; checkpoints and logs: {OUT}/")
    problems = [problem for verdict in verdicts for problem in verdict.problems]
    for problem in problems[:20]:
        console.print(problem, style="red", markup=False)
    say(f"[red]{len(problems)} comparisons failed[/]" if problems else "[green]every comparison holds[/]")
    return 1 if problems else 0


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the runs are ended on the way out
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    try:
        sys.exit(play())
    except Failed as error:
        console.print(error, style="red", markup=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
