"""DCP's own calls through `holdfast.dcp` against its FileSystemWriter and FileSystemReader.

The same live tensors, the same calls; all defaults.  All contestants fsync.
save         dcp.save, from the call until the checkpoint is complete
async call   dcp.async_save: how long the call blocks training (by thread)
async whole  the same, until its future is done
load         dcp.load into the live tensors, in place; the files are in the page cache.  holdfast verifies
             every byte by its digest.  Values are compared after the first round.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import count
from pathlib import Path
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
from bench.lib.files import files_below, warm

CLAIMS = (
    Claim(
        "Through holdfast.dcp, dcp.save takes half of FileSystemWriter's time.",
        r"^save, (.+?) \|",
        at_least=2,
    ),
    Claim(
        "Through holdfast.dcp, dcp.load takes half of FileSystemReader's time.",
        r"^load, (.+?) \|",
        at_least=2,
    ),
)
ACTS = ("save", "async call", "async whole", "load")


def work(job: Job) -> dict[str, Any]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    import holdfast.dcp
    from bench.lib.state import State

    state = State(job.size, small=job.args.small)
    tree, expected = state.for_dcp(), state.checksums()
    ours, theirs = job.root / "holdfast", job.root / "dcp"
    writer, step = holdfast.dcp.Writer(ours), count(1)
    cached = dcp.FileSystemWriter(theirs)  # one for all saves, so that its plans are kept, too
    group = dist.new_group(backend="gloo") if job.size > 1 else None
    whole: dict[str, list[float]] = {"holdfast": [], "dcp": []}

    def options(name: str) -> dict[str, Any]:
        if name == "holdfast":
            return {"storage_writer": writer, "checkpoint_id": str(next(step))}
        return {"storage_writer": cached, "checkpoint_id": theirs}

    def save(name: str, _: int) -> float:
        settle(job, job.root / name)  # nobody pays for deleting what was saved before
        took = slowest(partial(dcp.save, tree, **options(name)))
        settle(job)
        return took

    def save_async(name: str, _: int) -> float:
        settle(job, job.root / name)
        began, futures = time.perf_counter(), []

        def call() -> None:
            futures.append(dcp.async_save(tree, process_group=group, **options(name)))

        took = slowest(call)
        futures[0].result()
        whole[name].append(over_ranks(time.perf_counter() - began))
        settle(job)
        return took

    def load(name: str, number: int) -> float:
        at: Path = job.root / name
        if number == 0:
            state.wipe()
        if job.rank == 0:
            warm(files_below(at))
        reader: Any = (
            holdfast.dcp.Reader(ours) if name == "holdfast" else dcp.FileSystemReader(theirs)
        )
        took = slowest(partial(dcp.load, tree, storage_reader=reader))
        assert number or state.checksums() == expected, f"{name} loaded something else"
        return took

    samples = {}
    for what, act in (("save", save), ("async call", save_async), ("load", load)):
        for name in ("holdfast", "dcp"):
            act(name, 1)  # the first one imports, plans and allocates
            whole[name].clear()
        turns = {name: partial(act, name) for name in ("holdfast", "dcp")}
        samples[what] = take_turns(turns, job.args.rounds)
        if what == "async call":
            samples["async whole"] = {name: list(taken) for name, taken in whole.items()}
    settle(job, ours, theirs)
    return {"bytes": over_ranks(state.local_bytes, "SUM"), "samples": samples}


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    for ranks, f in found.items():
        for what in ACTS:
            s, num = f["samples"][what], f["bytes"] if what in ("save", "load") else 0
            who = f"{what}, {ranks_of(ranks)}"
            ours, theirs = (seconds(s, name, num) for name in ("holdfast", "dcp"))
            out.append(row(who, ours, theirs, ratio(s, "dcp", "holdfast")))
    return out


if __name__ == "__main__":
    main(CLAIMS, __doc__, work, rows, rounds=8)
