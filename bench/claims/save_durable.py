"""Durable saves: holdfast against dcp.save, torch.save and the raw device.

The time from the call until the step is on the disk and committed, on every rank.  The state lies as
FSDP2 leaves it: every tensor cut along dim 0 over the ranks.
holdfast   Checkpointer.save(step).wait(): fsynced, digested; second and later saves (the first, which
           plans and touches its buffer for the first time, is told apart).
dcp        torch.distributed.checkpoint.save with its defaults (it fsyncs).
torch.save one file per rank, as users do it: no fsync, so what it reports is not on the disk yet.
raw        the same bytes per rank by two threads of 8 MiB O_DIRECT writes from warm memory, and fsync.
"""

from __future__ import annotations

import os
import time
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
    slowest,
    take_turns,
)

CLAIMS = (
    Claim(
        "A durable save takes at most half as long as dcp.save.",
        r"^durable save, (.+?) \|.*\| dcp.save",
        at_least=2,
    ),
    Claim(
        "A durable save has 0.8 of the raw device's speed.",
        r"^durable save, (.+?) \|.*\| raw",
        at_least=0.8,
    ),
)


def work(job: Job) -> dict[str, Any]:
    import torch
    import torch.distributed.checkpoint as dcp

    import holdfast
    from bench.lib import raw
    from bench.lib.state import State

    state = State(job.size, small=job.args.small)
    tree, local = state.for_dcp(), state.local_dict()
    memory = raw.filled(state.local_bytes)
    for name in ("dcp", "torch", "raw"):
        (job.root / name).mkdir(exist_ok=True)
    ckpt = holdfast.Checkpointer(
        job.root / "holdfast", state.for_holdfast(), keep=holdfast.Keep(last=1), on_error="raise"
    )
    step = iter(range(1, 1000))

    def ours(_: int = 0) -> float:
        took = slowest(lambda: ckpt.save(next(step)).wait())
        while len(os.listdir(job.root / "holdfast" / "steps")) > 1:
            time.sleep(0.05)  # the old step is deleted in the background
        settle(job)
        return took

    def others(name: str, act: Any) -> Any:
        def run(number: int) -> float:
            took = slowest(lambda: act(job.root / name / f"{job.rank}.{number}"))
            settle(job, job.root / name)
            (job.root / name).mkdir(exist_ok=True)
            return took

        return run

    first = ours()
    samples = take_turns(
        {
            "holdfast": ours,
            "dcp": others("dcp", lambda _: dcp.save(tree, checkpoint_id=job.root / "dcp" / "at")),
            "torch.save": others("torch", lambda path: torch.save(local, path)),
            "raw": others("raw", lambda path: raw.write(path, memory)),
        },
        job.args.rounds,
    )
    ckpt.close()
    return {"bytes": over_ranks(state.local_bytes, "SUM"), "first_s": first, "samples": samples}


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    for ranks, f in found.items():
        s, n, who = f["samples"], f["bytes"], f"durable save, {ranks_of(ranks)}"
        ours = seconds(s, "holdfast", n)
        for name, note in (
            ("dcp", "dcp.save"),
            ("torch.save", "torch.save, no fsync"),
            ("raw", "raw O_DIRECT"),
        ):
            out.append(row(who, ours, f"{note}: {seconds(s, name, n)}", ratio(s, name, "holdfast")))
        out.append(
            row(
                f"first {who}",
                f"{f['first_s']:.2f} s",
                "later ones",
                f["first_s"] / median(s["holdfast"]),
            )
        )
    return out


if __name__ == "__main__":
    main(CLAIMS, __doc__, work, rows, rounds=8)
