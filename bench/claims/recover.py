"""A rank is killed: until all ranks have done the next step, in place and by restarts.

Four ranks under FSDP2 and gloo train a model from a seed; SIGKILL takes one of them, chosen by chance, at a
moment chosen by chance, again and again.  Two sizes: GPT-2 small with AdamW, 1.5 GB, and a model of 25 MB.
Contestants take turns, each in a job of its own, and their failures are spread over `--rounds`:
place      holdfast run, the function marked, a spare, a snapshot in memory of every step: the large one is
           waited for when the next is due, small ones are left out while another is being made
pages      the same without huge pages for tensors (the large model)
holdfast   the same script under torchrun
dcp        torchrun, dcp.save of every K-th step (`--every`), dcp.load
warm       the script of `dcp` under holdfast run: it is not marked, and all its ranks start again
shrink     holdfast run --nproc-min 3 without a spare: on with three ranks; a job for each failure
nvrx, torchft, lm   what others have (recover_peers.py), with the small model; where they are installed:
           `pip install --no-deps --target DIR ...`, and `--peers DIR`

Time counts from the kill until all ranks have done, in a later attempt, the step after the last one that
all had done before.  So who loses steps does them again; how many is reported, and when the first step of
any number was done.  A job ends a few steps after its last failure, and the weights then must be those of a
run that nothing befell, bit for bit, on every rank.

cost: steps by the same script under holdfast run and torchrun where nothing fails.  Both jobs are alive; in
turns one does a block of steps while the other is stopped.  What counts is the median over pairs of blocks,
with its 95 % confidence interval (of order statistics, so no distribution is assumed).
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.lib.claims import Claim
from bench.lib.common import report, reporting, row, scratch, williams
from bench.lib.recover_jobs import (
    CONTESTANTS,
    RANKS,
    WHOLE,
    Contestant,
    DoesNotRun,
    Job,
    Size,
    adopt,
    descendants,
    end_all,
    ended,
    failures,
    holdfast_run,
    missing,
    torchrun,
    under,
)
from bench.lib.stamps import PARTS

RECORDS = ("recover", "recover_large", "recover_small", "recover_cost", "recover_pages")
CLAIMS = (
    Claim(
        "In place, the next step of 1.5 GB of state is done within 2 s and the step.",
        r"^large: kill to next step done, in place",
        at_most=2,
        unit="s",
        records=RECORDS,
    ),
    Claim(
        "In place, the next step of 25 MB of state is done within 1 s.",
        r"^small: kill to next step done, in place",
        at_most=1,
        unit="s",
        records=RECORDS,
    ),
    Claim(
        "In place, 1.5 GB of state are back in a quarter of the time of torchrun with dcp.load.",
        r"^large: the same, beside torchrun \+ dcp.load",
        at_least=4,
        records=RECORDS,
    ),
    Claim(
        "In place, the next step is done no later than by anything else.",
        r"^(large: the same, beside (?!.*dcp.load).+?|small: the same, beside .+?) \|",
        at_least=1,
        records=RECORDS,
    ),
    Claim(
        "A script that is not marked goes on twice as fast as under torchrun.",
        r"^(\w+): any script, not marked",
        at_least=2,
        records=RECORDS,
    ),
    Claim(
        "Without a spare, three ranks have done the next step within 3 s and the step.",
        r"^(\w+): on with three ranks in place",
        at_most=3,
        unit="s",
        records=RECORDS,
    ),
    Claim(
        "A step under holdfast run takes at most 0.5 % longer than under torchrun.",
        r"^the upper end of its 95 % interval",
        at_most=1.005,
        records=RECORDS,
    ),
    Claim(
        "Killed runs end with the weights of one that nothing befell.",
        r"^(\w+): same weights at the end",
        at_least=1,
        unit="",
        records=RECORDS,
    ),
)
LARGE, SMALL, COST = "large", "small", "cost"
NAMES = {
    LARGE: ("place", "pages", "holdfast", "dcp", "shrink"),
    SMALL: ("place", "holdfast", "dcp", "warm", "shrink", "nvrx", "torchft", "lm"),
}
WORDS = {
    "holdfast": "torchrun + holdfast",
    "dcp": "torchrun + dcp.load",
    "lm": "lm-resiliency",
    "pages": "without huge pages",
}
LONGEST_S = 120.0
"""What a recovery may take."""
SHRINKS = 5


# -- failures -------------------------------------------------------------------------------------


def killed(args: argparse.Namespace, size: Size, root: Path) -> dict[str, Any]:
    """Every contestant's failures with this size, by its name."""
    names = [n for n in NAMES[size.name] if n in args.only]
    found: dict[str, Any] = {n: {"failures": [], "ends": [], "step_s": []} for n in names}
    for name in names:
        if lacks := missing(CONTESTANTS[name], args.peers):
            found[name]["left_out"] = lacks
    orders = williams(len(names))
    for number in range(args.rounds):
        for i in orders[number % len(orders)]:
            one, of = CONTESTANTS[names[i]], found[names[i]]
            for part, kills in enumerate(jobs_of(one, args, number)):
                if "left_out" not in of:
                    chance = random.Random(f"{args.seed} {number} {part}")
                    job = Job(one, size, root / f"{size.name}-{one.name}-{number}-{part}", kills,
                              args.peers)  # fmt: skip
                    play(job, chance, of)
    if names:
        checked(args, size, root, found)
    return found


def jobs_of(one: Contestant, args: argparse.Namespace, number: int) -> list[int]:
    """How many failures each of its jobs has in this round."""
    kills = min(args.kills, SHRINKS) if one.shrinks else args.kills
    kills = min(kills, args.peer_kills) if one.is_peer else kills
    now = kills * (number + 1) // args.rounds - kills * number // args.rounds
    return [1] * now if one.shrinks else [now] * (now > 0)


def play(job: Job, chance: random.Random, of: dict[str, Any]) -> None:
    """One job; what happened is added to what its contestant has."""
    try:
        with job:
            for failure in failures(job, chance, LONGEST_S):
                of["failures"].append(failure)
                print(f"{job.size.name} {job.one.name}: {failure['caught_up_s']:.2f} s, "
                      f"{failure['lost']} lost", flush=True)  # fmt: skip
            of["step_s"].append(job.log.step_s())
            if job.one.kind != "torchft":
                step, digests = max(ended(job).items())
                of["ends"].append([step, digests])
    except DoesNotRun as error:
        of["left_out"] = str(error)
        print(f"{job.size.name} {job.one.name}: {error}", flush=True)


def checked(args: argparse.Namespace, size: Size, root: Path, found: dict[str, Any]) -> None:
    """A run that nothing befalls; whether all ends are on its way."""
    ends = [end for n, of in found.items() if n != "shrink" for end in of["ends"]]
    if not ends:
        return
    steps = sorted({step for step, _ in ends})
    job = Job(
        WHOLE, size, root / f"{size.name}-whole", 0, more=["--digests", ",".join(map(str, steps))]
    )
    (job.root / "end").write_text(str(steps[-1]))
    with job:
        job.until(lambda: all(p.poll() is not None for p in job.processes), "the whole run", 600.0)
        digests = job.log.digests()
    for name, of in found.items():
        of["same"] = [digests.get(step) == told for step, told in of["ends"] if name != "shrink"]
    found["whole"] = {"step_s": [job.log.step_s()], "steps": steps[-1]}


# -- cost -----------------------------------------------------------------------------------------


class Gated:
    """A job that does as many steps as it is told, and is stopped while it is not."""

    def __init__(self, name: str, launcher: list[str], root: Path) -> None:
        self.job = Job(
            Contestant(name, "cost", under(*launcher)), Size(COST, [], 1), root / name, 0
        )
        self._gate = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._gate.bind(str(self.job.root / "gate"))
        self._gate.listen(RANKS)
        self._gate.settimeout(120.0)
        self.job.__enter__()
        self._ranks = [self._gate.accept()[0] for _ in range(RANKS)]
        for rank in self._ranks:
            rank.settimeout(120.0)
        time.sleep(8.0)  # until there is a spare
        self._processes = [p.pid for p in self.job.processes]
        self._processes += descendants(self._processes[0])
        self._send(signal.SIGSTOP)

    def _send(self, number: signal.Signals) -> None:
        for pid in self._processes:
            os.kill(pid, number)

    def block(self, steps: int) -> float:
        """Seconds that the slowest rank takes for so many."""
        self._send(signal.SIGCONT)
        time.sleep(0.05)
        for rank in self._ranks:
            rank.send(str(steps).encode())
        took = max(float(rank.recv(100)) for rank in self._ranks)
        self._send(signal.SIGSTOP)
        return took

    def end(self) -> list[str]:
        """The digests of its ranks at the end."""
        self._send(signal.SIGCONT)
        for rank in self._ranks:
            rank.send(b"0")
        self.job.until(lambda: len(self.job.log.records) and self._digests(), "the end", 30.0)
        return self._digests()

    def _digests(self) -> list[str]:
        found = next(iter(self.job.log.digests().values()), [])
        return found if len(found) == RANKS else []


def cost(args: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Pairs of blocks, the one first and then the other."""
    two = {"run": Gated("run", holdfast_run("--spares=1"), root),
           "torchrun": Gated("torchrun", torchrun(), root)}  # fmt: skip
    try:
        took = [one.block(50) for one in two.values()]
        steps = max(1, round(args.block_s / (took[1] / 50)))
        times: dict[str, list[float]] = {name: [] for name in two}
        for one in two.values():
            one.block(steps)
        until = time.monotonic() + args.cost_minutes * 60
        while time.monotonic() < until or len(times["run"]) % 2:
            order = list(two) if len(times["run"]) % 2 else list(two)[::-1]
            for name in order:
                times[name].append(two[name].block(steps))
        digests = {name: one.end() for name, one in two.items()}
    finally:
        for one in two.values():
            one.job.__exit__()
    return {"steps": steps, "samples": times, "digests": digests}


def of_median(values: list[float]) -> tuple[float, float, float]:
    """The median, and its 95 % confidence interval."""
    ordered, n = sorted(values), len(values)
    reach = 0.98 * n**0.5
    low, high = max(0, int(n / 2 - reach)), min(n - 1, int(n / 2 + reach))
    return median(ordered), ordered[low], ordered[high]


# -- rows -----------------------------------------------------------------------------------------


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    for size, of in found.items():
        if size == COST:
            out += cost_rows(of)
        else:
            out += size_rows(size, of)
    return out


def size_rows(size: str, of: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    step_s = of.get("whole", {}).get("step_s", [0.0])[0]
    runs = {name: x["failures"] for name, x in of.items() if x.get("failures")}
    place = runs.get("place")
    if place:
        out.append(
            row(f"{size}: kill to next step done, in place", told(place),
                f"a step takes {step_s:.3f} s", middle(place) - step_s * (size == LARGE),
                " s" + " beside the step" * (size == LARGE))
        )  # fmt: skip
    for name in runs:
        if place and name not in ("place", "shrink", "warm"):
            out += beside(size, name, place, runs[name])
    if "warm" in runs and "dcp" in runs:
        out.append(
            row(f"{size}: any script, not marked", told(runs["warm"]), f"torchrun {told(runs['dcp'])}",
                middle(runs["dcp"]) / middle(runs["warm"]))
        )  # fmt: skip
    if "shrink" in runs:
        out.append(
            row(f"{size}: on with three ranks in place", told(runs["shrink"]), "",
                middle(runs["shrink"]) - step_s, " s beside the step")
        )  # fmt: skip
    out += [part_row(size, part, runs) for part in PARTS if place and part in place[0]["parts"]]
    for name, x in of.items():
        if x.get("step_s") and name in ("place", "dcp"):
            mean_s = median(x["step_s"])
            out.append(row(f"{size}: a step meanwhile, {WORDS.get(name, name)}", f"{mean_s:.3f} s",
                           f"alone {step_s:.3f} s", mean_s / step_s if step_s else 0.0))  # fmt: skip
    return out + end_rows(size, of)


def beside(size: str, name: str, place: Any, other: Any) -> list[dict[str, Any]]:
    """In place, beside somebody else."""
    who = WORDS.get(name, name)
    out = [
        row(f"{size}: the same, beside {who}", told(place), told(other), middle(other) / middle(place)),
        row(f"{size}: until the first step of any number", told(place, "resumed_s"),
            f"{who} {told(other, 'resumed_s')}",
            middle(other, "resumed_s") / middle(place, "resumed_s")),
    ]  # fmt: skip
    if name == "torchft":
        out.append(
            row(f"{size}: until all four take part again", told(place, "whole_s"),
                f"{who} {told(other, 'whole_s')}", middle(other, "whole_s") / middle(place, "whole_s"))
        )  # fmt: skip
    return out


def middle(failures: list[dict[str, Any]], what: str = "caught_up_s") -> float:
    return median(f[what] for f in failures)


def told(failures: list[dict[str, Any]], what: str = "caught_up_s") -> str:
    """Median, worst and losses in words."""
    lost = [f["lost"] for f in failures]
    worst = max(f[what] for f in failures)
    text = f"{middle(failures, what):.2f} s, worst {worst:.2f} s of {len(failures)}"
    return text + f", {sum(lost) / len(lost):.1f} steps lost" * (what == "caught_up_s")


def part_row(size: str, part: str, runs: dict[str, Any]) -> dict[str, Any]:
    """Where the seconds go."""
    took = {
        name: median(f["parts"].get(part, 0.0) for f in of)
        for name, of in runs.items()
        if name in ("place", "holdfast", "dcp", "warm", "shrink")
    }
    others = ", ".join(f"{name} {s:.2f} s" for name, s in took.items() if name != "place")
    return row(f"{size}: - {PARTS[part]}", f"{took['place']:.2f} s", others, took["place"], " s")


def end_rows(size: str, of: dict[str, Any]) -> list[dict[str, Any]]:
    same = [x for one in of.values() for x in one.get("same", [])]
    out = [
        row(f"{size}: {name} does not run", one["left_out"].replace("|", "/")[:200], "",
            len(one.get("failures", [])), " failures before")
        for name, one in of.items()
        if "left_out" in one
    ]  # fmt: skip
    if same:
        out.append(
            row(f"{size}: same weights at the end", f"{sum(same)} of {len(same)} jobs",
                "a run that nothing befell", float(all(same)), "")
        )  # fmt: skip
    return out


def cost_rows(of: dict[str, Any]) -> list[dict[str, Any]]:
    run, beside = of["samples"]["run"], of["samples"]["torchrun"]
    value, low, high = of_median([a / b for a, b in zip(run, beside)])
    same = of["digests"]["run"] == of["digests"]["torchrun"]
    each = f"{len(run)} pairs of blocks of {of['steps']} steps"
    return [
        row(f"time of a step where nothing fails, {each}", f"{median(run) / of['steps'] * 1e3:.2f} ms",
            f"torchrun {median(beside) / of['steps'] * 1e3:.2f} ms", value),
        row("the upper end of its 95 % interval", "", f"from {low:.4f}", high),
        row("cost: same weights at the end", str(same), "", float(same), ""),
    ]  # fmt: skip


# -- driver ---------------------------------------------------------------------------------------


def parsed() -> argparse.Namespace:
    every = [*CONTESTANTS, COST]
    p = reporting(__doc__)
    p.add_argument(
        "--root", help="a directory on the disk to be used (default: beside the repository)"
    )
    p.add_argument("--sizes", default=f"{LARGE},{SMALL}", help="which, by comma (default: both)")
    p.add_argument(
        "--only", default=",".join(every), help=f"contestants, by comma, of {', '.join(every)}"
    )
    p.add_argument("--kills", type=int, default=20, help="of each contestant and size (20)")
    p.add_argument("--peer-kills", type=int, default=5, help="at most, of nvrx, torchft and lm (5)")
    p.add_argument("--rounds", type=int, default=2, help="jobs of each contestant and size (2)")
    p.add_argument("--every", type=int, default=4, help="steps from save to save of dcp (4)")
    p.add_argument("--peers", default="", help="a folder with packages of other projects")
    p.add_argument("--cost-minutes", type=float, default=5.0, help="of pairs of blocks (5)")
    p.add_argument("--block-s", type=float, default=1.0, help="seconds of a block (1)")
    p.add_argument("--seed", type=int, default=0, help="of the failures (0)")
    p.add_argument("--small", action="store_true", help="a tenth of the large state, to try it out")
    args = p.parse_args()
    args.only = args.only.split(",")
    if unknown := set(args.only) - set(every):
        p.error(f"--only: there is no {', '.join(sorted(unknown))}")
    return args


def main() -> None:
    args = parsed()
    large = ["--large", "--queue", *(["--small"] if args.small else [])]
    sizes = {LARGE: Size(LARGE, large, args.every), SMALL: Size(SMALL, [], args.every)}
    started, found = time.time(), {}
    adopt()
    with scratch(args) as root:
        try:
            for name in args.sizes.split(","):
                if name:
                    found[name] = killed(args, sizes[name], root)
            if COST in args.only:
                found[COST] = cost(args, root)
        finally:
            end_all()
    report(CLAIMS, __doc__, args, found, rows(found), started)


if __name__ == "__main__":
    main()
