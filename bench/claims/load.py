"""Loading on the same layout: holdfast against dcp.load and raw parallel preadv into the same tensors.

holdfast   holdfast.load into the live model and optimizer; every byte is verified by its digest.
dcp        torch.distributed.checkpoint.load, in place.
raw        two threads per rank of 2 MiB preadv straight into the tensors; nothing is verified.
Warm: the files are in the page cache.  Cold: they were taken out of it (fsync, posix_fadvise, checked by
mincore) just before; a hypervisor's cache is out of reach.  Values are compared after the first round.
"""

from __future__ import annotations

import argparse
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
from bench.lib.files import evict, files_below, warm

CLAIMS = (
    Claim(
        "A load from the page cache takes at most half as long as dcp.load.",
        r"^load, warm, (.+?) \|.*\| dcp.load",
        at_least=2,
    ),
    Claim(
        "A load from the page cache has 0.8 of the speed of raw reads.",
        r"^load, warm, (.+?) \|.*\| raw",
        at_least=0.8,
    ),
    Claim(
        "A load from the disk has 0.8 of the speed of raw reads.",
        r"^load, cold, (.+?) \|.*\| raw",
        at_least=0.8,
    ),
)


def work(job: Job) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    import holdfast
    from bench.lib import raw
    from bench.lib.state import State

    state = State(job.size, small=job.args.small, width=job.args.width)
    tensors, expected = state.locals(), state.checksums()
    flat = job.root / "raw" / f"r{job.rank}"
    flat.parent.mkdir(exist_ok=True)
    holdfast.save(job.root / "holdfast", state.for_holdfast(), step=1)
    dcp.save(state.for_dcp(), checkpoint_id=job.root / "dcp")
    raw.write_tensors(flat, tensors)
    settle(job)

    acts = {
        "holdfast": lambda: holdfast.load(job.root / "holdfast", state.for_holdfast()),
        "dcp": lambda: dcp.load(state.for_dcp(), checkpoint_id=job.root / "dcp"),
        "raw": lambda: raw.read_tensors(flat, tensors),
    }
    left: list[float] = []

    def contestant(name: str, cold: bool) -> Any:
        def run(number: int) -> float:
            if number == 0:
                state.wipe()
            if job.rank == 0:
                paths = files_below(job.root / name)
                left.append(evict(paths)) if cold else warm(paths)
            took = slowest(acts[name])
            assert number or state.checksums() == expected, f"{name} loaded something else"
            return took

        return run

    found = {
        kind: take_turns({n: contestant(n, kind == "cold") for n in acts}, job.args.rounds)
        for kind in ("warm", "cold")
    }
    settle(job, job.root / "holdfast", job.root / "dcp", job.root / "raw")
    return {
        "bytes": over_ranks(state.local_bytes, "SUM"),
        "samples": found,
        "pages_left_when_cold": max(left, default=None),
    }


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    for ranks, f in found.items():
        for kind, s in f["samples"].items():
            who = f"load, {kind}, {ranks_of(ranks)}"
            ours = seconds(s, "holdfast", f["bytes"])
            for name, note in (("dcp", "dcp.load"), ("raw", "raw preadv")):
                against = f"{note}: {seconds(s, name, f['bytes'])}"
                out.append(row(who, ours, against, ratio(s, name, "holdfast")))
    return out


def extend(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--width", type=int, default=768, help="of the model: 1152 makes 3 GB of as many tensors"
    )


if __name__ == "__main__":
    main(CLAIMS, __doc__, work, rows, rounds=12, extend=extend)
