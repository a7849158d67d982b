"""The demo: a training run is killed in mid-save, then moved to other layouts twice, and ends unharmed.

    python examples/demo.py          # two to three minutes on two cores; writes demo-out/

Phase 0 trains without interruption, for reference. Phase 1 trains the same on the same layout, but
one of its four ranks is killed while a checkpoint is being written. Phases 2 and 3 carry its run on
with two processes and with one. Phase 4 trains from scratch again and records every step: one of its
ranks is killed at a random moment, and at most one step is done again. Phase 5 does the same under
`holdfast run`, where the other ranks keep their processes, and a spare takes the place of the killed one.
Then everything is compared; the exit status is 1 if any comparison fails.
"""

import random
import shutil
import signal
import sys
import time
from pathlib import Path

from compare import Verdict, across_layouts, against_reference
from launch import Assassin, Chance, Failed, Phase, Record, Run
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

OUT = Path("demo-out")
HORIZON, EVERY = 80, 10  # steps in all, and between checkpoints
REFERENCE = Phase("0 reference", OUT / "reference", dp=2, tp=2, until=HORIZON)
KILLED = Phase("1 killed", OUT / "run", dp=2, tp=2, until=40)
FEWER = Phase("2 fewer", OUT / "run", dp=2, tp=1, until=60)
ALONE = Phase("3 alone", OUT / "run", dp=1, tp=1, until=HORIZON)
RECORDED = Phase("4 recorded", OUT / "recorded", dp=2, tp=2, until=20, records=True)
IN_PLACE = Phase("5 in place", OUT / "place", dp=2, tp=2, until=20, records=True, in_place=True)
COLUMNS = (
    "phase",
    "parallelism",
    "steps",
    "from\nstep",
    "steps\nlost",
    "verdict",
    "tensors",
    "max\nloss\ngap",
)
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:red")
MOMENTS = {Assassin: "half saved is step", Chance: "some time after step"}

console = Console(highlight=False)
began = time.monotonic()


def say(text: str) -> None:
    console.print(f"[dim]{time.monotonic() - began:6.1f} s[/]  {text}")


def processes(number: int) -> str:
    return f"{number} process" + "es" * (number != 1)


def tell(phase: Phase, record: Record) -> None:
    """One line per start and per checkpoint interval."""
    if record["event"] == "start":
        step = record["restored_from"]
        origin = f"restored step [bold]{step}[/]" if step else "from scratch"
        say(f"{processes(len(record['pids']))} up, {origin}")
    elif record["step"] % EVERY == 0:
        say(f"step {record['step']:3d} of {phase.until}   loss {record['loss']:.4f}")


def carry_out(phase: Phase, assassin: Assassin | Chance | None = None) -> Run:
    """Run a phase to its end, and say what happens."""
    title = f"[bold]phase {phase.name}[/]: {processes(phase.dp * phase.tp)}, parallelism: {phase.layout}"
    console.rule(title, align="left")
    every = phase.until if phase.records else EVERY
    with Run(phase, OUT, horizon=HORIZON, every=every) as run, console.status("starting") as status:
        alive = True
        while alive:
            alive = run.alive()  # asked first: what is read after the end is everything
            for record in run.new_records():
                tell(phase, record)
                status.update(f"step {record.get('step', 0)} of {phase.until}")
            if assassin and assassin.look(run):
                say(
                    f"[red]SIGKILL to rank {assassin.rank}[/]: {MOMENTS[type(assassin)]} {assassin.step}"
                )
            time.sleep(0.001 if assassin and assassin.step is None else 0.05)
    return run


def check_recorded(run: Run, chance: Chance) -> float:
    """A rank was killed, and at most one step that was done had to be done again.  Return the seconds from
    the kill to the end of the next step."""
    lost = run.lost()
    if chance.step is None or lost is None:
        raise run.failed("no rank was killed, or the launcher did not restart the run")
    if lost > 1:
        raise run.failed(f"{lost} steps were lost, though every one was recorded")
    say(
        f"went on from the record of step {run.starts()[1]['restored_from']}: {lost} steps were done again"
    )
    seconds = run.until_next_step_s(chance.killed)
    say(f"next step done on all ranks [bold]{seconds:.1f} s[/] after the kill")
    return seconds


def check_in_place(run: Run, chance: Chance) -> float:
    """The same, and that all other ranks are still the processes that they were."""
    seconds = check_recorded(run, chance)
    before, after = (set(start["pids"]) for start in run.starts()[:2])
    if len(before & after) != len(before) - 1:
        raise run.failed(f"the processes were {before}, and are {after}")
    say(f"{processes(len(before & after))} went on, a spare took the place of rank {chance.rank}")
    return seconds


def compare_launchers(in_place_s: float, restarted_s: float) -> None:
    say("until the next step after SIGKILL of a rank:")
    say(f"[bold green]{in_place_s:6.1f} s[/]  in place, under holdfast run --spares 1")
    say(f"[bold]{restarted_s:6.1f} s[/]  all processes anew, under torchrun")


def check_kill(run: Run, assassin: Assassin) -> None:
    """The story must be true: a rank was killed, and the run went on from a step that was whole."""
    if assassin.step is None:
        raise Failed("no save could be caught half done; run the demo again")
    if len(run.starts()) < 2:
        raise run.failed(f"rank {assassin.rank} was killed, but torchrun did not restart the run")
    origin = run.starts()[1]["restored_from"]
    if origin == assassin.step:
        say(f"step {origin} was complete in the very moment of the kill, so nothing was lost")
    else:
        again = f"steps {origin + 1} to {assassin.step} were done again"
        say(f"half-saved step {assassin.step} was not used; {again}")


def table(runs: list[Run], verdicts: list[Verdict]) -> Table:
    title = "tensors compared with the uninterrupted run, and across layouts"
    result = Table(*COLUMNS, title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for run, verdict in zip(runs, verdicts):
        origins = [start["restored_from"] for start in run.starts()]
        result.add_row(
            run.phase.name,
            run.phase.layout,
            f"{origins[0]}-{run.phase.until}",
            ", ".join(str(step) for step in origins if step),
            "" if run.lost() is None else str(run.lost()),
            f"[{'red' if verdict.problems else 'green'}]{verdict.text}[/]",
            str(verdict.num_tensors),
            f"{verdict.loss_difference:.0e}" if verdict.loss_difference else "0",
        )
    return result


def draw(reference: Run, runs: list[Run], assassin: Assassin, path: Path) -> None:
    """Losses over the reference, and below them how far they are from it."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    expected = dict(reference.losses())
    above.plot(*zip(*expected.items()), "0.8", linewidth=6, label=described(reference))
    for run, colour in zip(runs, COLOURS):
        style = "--" if run.phase.records else "-"
        above.plot([], [], colour, linestyle=style, label=described(run))
        for stretch in filter(None, run.stretches()):
            steps, losses = zip(*stretch)
            gaps = [abs(loss - expected[step]) for step, loss in stretch]
            above.plot(steps, losses, colour, linestyle=style)
            below.plot(steps, gaps, ".", color=colour)
        above.axvline(run.starts()[-1]["restored_from"], color="0.5", linestyle=":", linewidth=1)
    killed = f"rank {assassin.rank} killed in mid-save"
    above.plot(assassin.step, expected[assassin.step], "rx", markersize=12, label=killed)
    above.set(ylabel="loss", title="killed, then moved to fewer processes (dotted: restored)")
    above.legend()
    below.set(xlabel="step", ylabel="from reference")
    figure.savefig(path, dpi=120)


def described(run: Run) -> str:
    """How many processes trained, and how they shared the model: `2 fewer: 2 processes, FSDP x2`."""
    number = run.phase.dp * run.phase.tp
    return f"{run.phase.name}: {processes(number)}" + f", {run.phase.layout}" * (number > 1)


def play() -> int:
    """All phases, then the comparisons; the exit status."""
    reference = carry_out(REFERENCE)
    assassin = Assassin(KILLED.root, patience=2 * EVERY)
    killed = carry_out(KILLED, assassin)
    check_kill(killed, assassin)
    fewer, alone = carry_out(FEWER), carry_out(ALONE)
    chance = Chance(random.randrange(4, 10))
    recorded = carry_out(RECORDED, chance)
    restarted_s = check_recorded(recorded, chance)
    chance = Chance(random.randrange(4, 10))
    in_place = carry_out(IN_PLACE, chance)
    in_place_s = check_in_place(in_place, chance)
    console.rule("[bold]comparing[/]", align="left")
    verdicts = [
        against_reference(killed, reference),
        across_layouts(fewer, killed, reference),
        across_layouts(alone, fewer, reference),
        against_reference(recorded, reference),
        against_reference(in_place, reference),
    ]
    runs = [killed, fewer, alone, recorded, in_place]
    console.print(table(runs, verdicts))
    draw(reference, runs, assassin, OUT / "loss.png")
    compare_launchers(in_place_s, restarted_s)
    say(f"loss curves: {OUT / 'loss.png'}; checkpoints and logs: {OUT}/")
    problems = [problem for verdict in verdicts for problem in verdict.problems]
    for problem in problems[:20]:
        console.print(problem, style="red", markup=False)
    if problems:
        say(f"[red]{len(problems)} comparisons failed[/]")
        return 1
    say("[green]every comparison holds[/]")
    return 0


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception: the runs are ended too
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    try:
        sys.exit(play())
    except Failed as error:
        console.print(error, style="red", markup=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
