"""A rank is killed: from the failure until the next step is done, and the work that is lost.

A training of 2 ranks under `torchrun --max-restarts` is killed again and again, by SIGKILL of one rank in
the midst of a step.  Each restart goes on from what the contestant whose turn it was had kept:
holdfast   Checkpointer(every=Every(memory=1)): a snapshot after each step that finds none under way
dcp        torch.distributed.checkpoint.async_save with its defaults; dcp.load of the newest complete one

One *step* is a compute loop (matrix products and nothing else, in the place of forward and backward), a
barrier and a real AdamW step over the whole state.  The loop keeps all cores busy, so that the agent, which
yields to the training, makes little headway; so all is measured once more with a step that waits for as
long, as for a device that computes.  Nothing is evicted: dcp.load finds its files in the page cache, as
ranks do that go on where they were.

Work lost: with holdfast as observed, from the end of the restored step to the kill (at another part of a
step in each round).  With dcp it depends on how often one saves.  That is taken to be optimal after Young
and Daly (Daly 2006, "A higher order estimate of the optimum checkpoint interval", first order): every
sqrt(2 C M) seconds, C what one async_save takes from the training and M the mean time between failures,
`--mtbf-hours`; then half an interval is lost on average, and what is done until a save is complete.

The last row is about memory: 4 ranks, each on a node of its own, keep parity for each other, or copies.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.lib.claims import Claim
from bench.lib.common import (
    Job,
    main,
    over_ranks,
    ratio,
    row,
    seconds,
    settle,
    shared_memory,
    williams,
)
from bench.lib.killed import DEVICE, Dcp, Holdfast, Training
from bench.lib.stamps import born

CLAIMS = (
    Claim(
        "After a kill under torchrun, the next step is done no later than with dcp.load.",
        r"^failure to next step done, (.+?) \|",
        at_least=1,
    ),
    Claim(
        "In a group of four nodes, parity takes 0.4 of the host memory of full copies.",
        r"^host memory kept for others",
        at_most=0.4,
    ),
)

NAMES = ("holdfast", "dcp")
GUARDS = " guards"
PARTS = {
    "torchrun": "torchrun notices, ends the other rank, starts both",
    "imports": "Python and imports",
    "group": "process group",
    "model": "model and optimizer",
    "checkpointer": "Checkpointer made (dcp: its process group)",
    "restore": "restored",
    "step": "first step",
}


def life() -> int:
    """How often this training has been started again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def turns(rounds: int) -> list[str]:
    """Who is killed in which life."""
    orders = williams(len(NAMES))
    return [NAMES[i] for number in range(rounds) for i in orders[number % len(orders)]]


# -- a life ---------------------------------------------------------------------------------------


def made(name: str, job: Job, training: Training, number: int) -> Holdfast | Dcp:
    return (Holdfast if name == "holdfast" else Dcp)(job, training, number)


def failures(job: Job) -> dict[str, Any]:
    """Go on after the last failure, if there was one, and come to the next.  Returns after the last."""
    import torch.distributed as dist

    marks = {"killed": 0.0, "torchrun": born(), "imports": IMPORTED, "group": time.time()}
    order, number = turns(job.args.rounds), life()
    records = job.root / f"lives{job.phase.strip()}"
    training = Training(job)
    marks["model"] = time.time()
    if number:
        marks["killed"] = float((job.root / "killed").read_text())
        one = made(order[number - 1], job, training, number - 1)
        marks["checkpointer"] = time.time()
        restored = one.restore()
        marks["restore"] = time.time()
        training.went_back(restored)
        training.calibrate()
        marks["step"] = training.step()
        one.close()
        note(job, records, number - 1, {"restored": restored, "parts": parts(marks)}, marks)
    if number == len(order):
        return {
            "bytes": over_ranks(training.state.local_bytes, "SUM"),
            "mtbf_s": job.args.mtbf_hours * 3600,
            "killed": order,
            "lives": [json.loads((records / f"{n}").read_text()) for n in range(len(order))],
        }
    training.calibrate()
    bare = training.bare()
    before = made(order[number], job, training, number).until_killed(bare)
    if job.rank == 0:
        records.mkdir(exist_ok=True)
        (records / f"{number}").write_text(json.dumps(before))
    dist.barrier()
    round_number = number // len(NAMES)
    training.killed((round_number + 0.5) / job.args.rounds)
    raise AssertionError("this rank should have been killed")


def parts(marks: dict[str, float]) -> dict[str, float]:
    """Seconds from mark to mark, each at the slowest rank."""
    ends = {name: over_ranks(at) for name, at in marks.items()}
    times = list(ends.values())
    return dict(zip(list(ends)[1:], (b - a for a, b in zip(times, times[1:]))))


def note(job: Job, records: Path, number: int, after: dict[str, Any], marks: Any) -> None:
    """Complete the record of a life that was killed, and remove what it left."""
    settle(job, *job.root.glob("holdfast-*"), *job.root.glob("dcp-*"))
    if job.rank:
        return
    record = json.loads((records / f"{number}").read_text()) | after
    record["failure_s"] = sum(after["parts"].values())
    if "ended" in record:
        ended = record.pop("ended")
        record["lost_steps"] = int(max(ended, key=int)) - after["restored"]
        record["lost_s"] = marks["killed"] - ended[str(after["restored"])]
    (records / f"{number}").write_text(json.dumps(record))


# -- memory ---------------------------------------------------------------------------------------


def guards(job: Job) -> dict[str, Any]:
    """Bytes of shared memory that agents keep for other ranks than their own, by scheme."""
    from bench.lib.state import State
    from holdfast.tiers.memory.node import messages as w
    from holdfast.tiers.memory.node.client import Client

    os.environ["LOCAL_RANK"] = "0"  # the first, and only, rank of its node
    state = State(job.size, small=job.args.small)
    found = {}
    for scheme in ("copy", "parity"):
        here = shared_memory() / scheme / f"node{job.rank}"
        os.environ["HOLDFAST_MEMORY_DIR"] = str(here)
        ckpt = snapshot_of(job, state, scheme)
        (name,) = (p.name for p in (here / "jobs").iterdir())
        held = Client().ask(w.Ask(name), w.Held)
        for kind in ("share", "guard"):
            files = [Path(held.directory) / i.name for i in held.images if i.kind == kind]
            found[f"{scheme} {kind}"] = over_ranks(
                sum(f.stat().st_blocks * 512 for f in files), "SUM"
            )
        ckpt.close()
        Client().ask(w.Stop(free=True))
    return {"bytes": over_ranks(state.local_bytes, "SUM"), "kept": found}


def snapshot_of(job: Job, state: Any, scheme: str) -> Any:
    """One snapshot, complete."""
    import holdfast

    ckpt = holdfast.Checkpointer(
        job.root / scheme,
        state.for_holdfast(),
        every=holdfast.Every(memory=1),
        memory=holdfast.Memory(scheme, budget="64GB"),
        on_error="raise",
    )
    ckpt.step(1)
    ckpt.wait()
    return ckpt


# -- rows -----------------------------------------------------------------------------------------


def work(job: Job) -> dict[str, Any]:
    import torch.distributed as dist

    os.environ["HOLDFAST_MEMORY_DIR"] = str(shared_memory())
    found = (guards if job.phase == GUARDS else failures)(job)
    dist.barrier()
    if job.rank == 0:
        shutil.rmtree(shared_memory(), ignore_errors=True)
    return found


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    for what, f in found.items():
        who = what.replace(DEVICE, "") + " ranks" + ", a device computes" * what.endswith(DEVICE)
        out += memory_rows(f) if what.endswith(GUARDS) else failure_rows(f, who)
    return out


def failure_rows(f: dict[str, Any], who: str) -> list[dict[str, Any]]:
    lives = {n: [x for m, x in zip(f["killed"], f["lives"]) if m == n] for n in NAMES}
    failed = {n: [x["failure_s"] for x in of] for n, of in lives.items()}
    what = f"failure to next step done, {who}"
    out = [compared(what, failed)]
    for part, text in PARTS.items():
        took = {n: [x["parts"][part] for x in of] for n, of in lives.items()}
        out.append(compared(f"- {text}", took))
    return out + lost_rows(lives, f["mtbf_s"], who)


def compared(what: str, took: dict[str, list[float]]) -> dict[str, Any]:
    other = f"dcp {seconds(took, 'dcp')}"
    return row(what, seconds(took, "holdfast"), other, ratio(took, "dcp", "holdfast"))


def lost_rows(
    lives: dict[str, list[dict[str, Any]]], mtbf_s: float, who: str
) -> list[dict[str, Any]]:
    """Work lost: as observed, and as expected of saves at the optimal interval."""

    def middle(name: str, key: str) -> float:
        return median(x[key] for x in lives[name])

    cost, duration = middle("dcp", "cost_s"), middle("dcp", "duration_s")
    interval = math.sqrt(2 * cost * mtbf_s)
    expected = interval / 2 + duration
    bare = middle("dcp", "bare_s")
    lost_s, lost_steps = middle("holdfast", "lost_s"), middle("holdfast", "lost_steps")
    how = (
        f"async_save every {interval:.0f} s (C {cost:.2f} s, M {mtbf_s / 3600:g} h), expected: half of "
        f"that and a save's {duration:.1f} s"
    )
    return [
        row(f"work lost by a failure, {who}", f"{lost_s:.1f} s", f"{expected:.1f} s: {how}",
            expected / lost_s),
        row(f"steps lost by a failure, {who}", f"{lost_steps:g} done of {bare:.2f} s",
            f"{expected / bare:.0f}", expected / bare - lost_steps, " steps saved"),
    ]  # fmt: skip


def memory_rows(f: dict[str, Any]) -> list[dict[str, Any]]:
    parity, copies = f["kept"]["parity guard"], f["kept"]["copy guard"]
    return [
        row("host memory kept for others, group of 4", f"parity {parity / 1e9:.2f} GB",
            f"full copies {copies / 1e9:.2f} GB", parity / copies)
    ]  # fmt: skip


def extend(p: argparse.ArgumentParser) -> None:
    p.add_argument("--compute", type=float, default=1.0, help="seconds of computing per step (1)")
    p.add_argument("--mtbf-hours", type=float, default=1.0, help="mean time between failures (1)")


def phases(numbers: list[int]) -> list[tuple[int, str]]:
    return [(numbers[0], ""), (numbers[0], DEVICE), (numbers[1], GUARDS)]


def restarts(args: argparse.Namespace, phase: str) -> int:
    return 0 if phase == GUARDS else len(NAMES) * args.rounds


def imports() -> None:
    """What a training imports that goes on with the contestant of the last life."""
    import bench.lib.state  # noqa: F401

    if turns(life())[life() - 1] == "holdfast":
        import holdfast  # noqa: F401
    else:
        import torch.distributed.checkpoint  # noqa: F401


IMPORTED = 0.0

if __name__ == "__main__":
    if "--worker" in sys.argv and life():
        imports()
        IMPORTED = time.time()
    main(
        CLAIMS, __doc__, work, rows,
        rounds=3, ranks="2,4", phases=phases, extend=extend, restarts=restarts,
    )  # fmt: skip
