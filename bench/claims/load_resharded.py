"""Loading on another layout: saved on 2 ranks cut along dim 0, loaded on 4 ranks cut along dim 1.

Plain DTensors of the whole state (tensors of one dim stay cut along dim 0).  Page cache warm.  Beside the
time: bytes read over all ranks per distinct byte wanted, as holdfast counts them (read.bytes) and as the
kernel does (rchar of /proc/self/io, which also sees pipes and sockets).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.lib.claims import Claim
from bench.lib.common import (
    Job,
    main,
    over_ranks,
    ratio,
    row,
    seconds,
    slowest,
    take_turns,
)
from bench.lib.files import files_below, warm

CLAIMS = (
    Claim(
        "A load on another layout takes at most a quarter of dcp.load's time.",
        r"^resharding load",
        at_least=4,
    ),
    Claim(
        "A load on another layout reads each byte once.",
        r"^bytes read per byte wanted",
        at_most=1.05,
    ),
)


def saved(job: Job) -> Path:
    """Where both phases find it."""
    return job.root.parent / "saved"


def save(job: Job) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    import holdfast
    from bench.lib.state import State

    tree = State(job.size, small=job.args.small).for_dcp()
    root = saved(job)
    holdfast.save(root / "holdfast", {"state": tree}, step=1)
    dcp.save({"state": tree}, checkpoint_id=root / "dcp")
    return {}


def load(job: Job) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    import holdfast
    from bench.lib.state import State

    state = State(job.size, small=job.args.small, dim=1, seed=job.rank)
    live, root = {"state": state.for_dcp()}, saved(job)
    if job.rank == 0:
        warm(files_below(root))
    acts = {
        "holdfast": lambda: holdfast.load(root / "holdfast", live),
        "dcp": lambda: dcp.load(live, checkpoint_id=root / "dcp"),
    }
    read: dict[str, dict[str, float]] = {name: {} for name in acts}
    sums: dict[str, list[int]] = {}

    def contestant(name: str) -> Any:
        def run(number: int) -> float:
            if number == 0:
                state.wipe()
            before = rchar(), holdfast.events.counters["read.bytes"]
            took = slowest(acts[name])
            read[name]["rchar"] = over_ranks(rchar() - before[0], "SUM")
            read[name]["counted"] = over_ranks(
                holdfast.events.counters["read.bytes"] - before[1], "SUM"
            )
            if number == 0:
                sums[name] = state.checksums()
            return took

        return run

    samples = take_turns({name: contestant(name) for name in acts}, job.args.rounds)
    assert sums["holdfast"] == sums["dcp"], "holdfast and dcp loaded different values"
    assert any(sums["dcp"])
    return {"bytes": over_ranks(state.local_bytes, "SUM"), "samples": samples, "read": read}


def rchar() -> int:
    with open("/proc/self/io") as f:
        return int(f.readline().split()[1])


def work(job: Job) -> dict[str, Any]:
    return save(job) if job.phase == " save" else load(job)


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    f = found["4 load"]
    s, n, read = f["samples"], f["bytes"], f["read"]
    who = "resharding load, Shard(0) on 2 to Shard(1) on 4"
    counted, seen = read["holdfast"]["counted"] / n, {k: v["rchar"] / n for k, v in read.items()}
    ours, theirs = seconds(s, "holdfast", n), f"dcp.load: {seconds(s, 'dcp', n)}"
    dcp_read = f"dcp (rchar): {seen['dcp']:.3f}"
    return [
        row(who, ours, theirs, ratio(s, "dcp", "holdfast")),
        row("bytes read per byte wanted", f"{counted:.3f}", dcp_read, counted),
        row("the same by rchar", f"{seen['holdfast']:.3f}", dcp_read, seen["holdfast"]),
    ]


if __name__ == "__main__":
    main(
        CLAIMS, __doc__, work, rows, rounds=6, ranks="2,4",
        phases=lambda n: [(n[0], " save"), (n[1], " load")],
    )  # fmt: skip
