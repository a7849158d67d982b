"""How long snapshots hold the training on a node whose cores are busy: against durable saves.

As many busy loops as there are cores run beside the training, in the place of workers of a data loader,
each in a session of its own, as other programs of the node are (`--loops 0`: none, where others are busy).
A *turn* is a few steps, each of which computes for a while, moves the state by AdamW, and is saved, by one
contestant; the training waits for the save before (`when_busy="queue"`).  *Held* is what a step takes
longer than the median step without a save under the same load.  The last save of a turn is waited for
outside of it.
durable   Checkpointer.save to storage
snapshot  Checkpointer.step with Every(memory=1), in shared memory, digested by the agent
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

from bench.lib.claims import Claim
from bench.lib.common import (
    Job,
    main,
    over_ranks,
    ranks_of,
    ratio,
    row,
    seconds,
    settle,
    take_turns,
    with_compute,
)

CLAIMS = (
    Claim(
        "On busy cores, a step with a snapshot takes at most twice one with a durable save.",
        r"^step with a save, busy cores, (.+?) \|",
        at_most=2,
    ),
    Claim(
        "On busy cores, a snapshot holds the training at most twice as long as a durable save.",
        r"^held by it, of a step",
        at_most=2,
    ),
)

STEPS = 3
"""Steps of a turn."""
LOOP = """
import os, sys, time
parent, until = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
while os.getppid() == parent and time.monotonic() < until:
    sum(range(10_000))
"""
"""A busy loop, which ends with whoever began it, however that ends, and by itself."""


def with_loops(p: argparse.ArgumentParser) -> None:
    with_compute(p)
    p.add_argument("--loops", type=int, default=os.cpu_count() or 1, help="busy loops beside")
    p.add_argument("--most", type=float, default=60.0, help="seconds of these (default: 60)")


def work(job: Job) -> dict[str, Any]:
    import torch.distributed as dist

    import holdfast
    from bench.lib.trainer import Trainer

    os.environ["HOLDFAST_MEMORY_DIR"] = str(job.root / "memory")
    trainer = Trainer(job)
    state, found = trainer.state.for_holdfast(), {}
    step = iter(range(1, 10_000))
    alone: list[float] = []

    def plain() -> float:
        dist.barrier()
        started = time.perf_counter()
        trainer.compute()
        trainer.update()
        return time.perf_counter() - started

    with ExitStack() as opened:
        durable = opened.enter_context(
            holdfast.Checkpointer(
                job.root / "durable", state, keep=holdfast.Keep(last=1), on_error="raise"
            )
        )
        snapshot = opened.enter_context(
            holdfast.Checkpointer(
                job.root / "snapshot",
                state,
                every=holdfast.Every(memory=1),
                memory=holdfast.Memory("none"),
                when_busy="queue",
                on_error="raise",
            )
        )
        saves: dict[str, tuple[Callable[[int], object], Callable[[], object]]] = {
            "durable": (durable.save, durable.wait),
            "snapshot": (snapshot.step, snapshot.wait),
        }

        def turn(name: str) -> float:
            """Seconds that each of a few steps was held, at the median step's expense."""
            save, wait = saves[name]
            alone.append(plain())
            dist.barrier()
            started = time.perf_counter()
            for _ in range(STEPS):
                save(next(step))
                trainer.compute()
                trainer.update()
            took = (time.perf_counter() - started) / STEPS
            wait()
            settle(job)
            return over_ranks(took)

        for name in saves:  # the first ones make memory
            turn(name)
        loops = [
            subprocess.Popen(
                [sys.executable, "-c", LOOP, str(os.getpid()), str(job.args.most)],
                start_new_session=True,
            )
            for _ in range(job.args.loops)
            if job.rank == 0
        ]
        try:
            alone.clear()
            found = take_turns(
                {name: lambda _, name=name: turn(name) for name in saves}, job.args.rounds
            )
        finally:
            for loop in loops:
                loop.kill()
                loop.wait()
    base = median(alone)
    return {
        "bytes": over_ranks(trainer.state.local_bytes, "SUM"),
        "plain_step_s": over_ranks(base),
        "load_average": os.getloadavg(),
        "samples": {n: [max(0.0, s - base) for s in x] for n, x in found.items()},
        "steps_s": found,
    }


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    for ranks, f in found.items():
        steps = f["steps_s"]
        what = f"step with a save, busy cores, {ranks_of(ranks)}"
        ours, other = seconds(steps, "snapshot"), f"durable: {seconds(steps, 'durable')}"
        out.append(row(what, ours, other, ratio(steps, "snapshot", "durable")))
        held = {n: median(x) for n, x in f["samples"].items()}
        longest = max(f["samples"]["snapshot"]), max(f["samples"]["durable"])
        out.append(
            row(
                f"held by it, of a step of {f['plain_step_s']:.2f} s",
                f"{held['snapshot']:.2f} s, at most {longest[0]:.2f} s",
                f"durable: {held['durable']:.2f} s, at most {longest[1]:.2f} s",
                held["snapshot"] / max(held["durable"], 1e-3),
            )
        )
    return out


if __name__ == "__main__":
    main(CLAIMS, __doc__, work, rows, rounds=4, ranks="1", extend=with_loops)
