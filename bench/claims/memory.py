"""Host memory: the peak of a save and of a load over what the model itself takes, per rank.

Each case runs in fresh processes.  After the state is made (and freed memory given back), the kernel's
high-water mark of resident memory is reset; the figure is that mark after the operation less what was
resident before it, of the worst rank.  Three saves in a row; loads are in place; the page cache does not
count.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Any

from bench.lib.claims import Claim
from bench.lib.common import MIB, Job, main, over_ranks, ranks_of, row
from bench.lib.watching import status

CLAIMS = (
    Claim(
        "On one rank, an asynchronous save takes the rank's share of the state, and 64 MiB.",
        r"async save, 1 rank ",
        at_most=1434 + 64,
        unit="MiB",
    ),
    Claim(
        "On two ranks, an asynchronous save takes the rank's share of the state, and 64 MiB.",
        r"async save, 2 ranks",
        at_most=717 + 64,
        unit="MiB",
    ),
    Claim(
        "A load takes at most 256 MiB.", r"over the model's, (load.+?) \|", at_most=256, unit="MiB"
    ),
)

CASES = (
    ("save", "holdfast"), ("save", "dcp"),
    ("load", "holdfast"), ("load", "dcp"),
    ("reshard", "holdfast"), ("reshard", "dcp"),
)  # fmt: skip


class Peak:
    """Peak resident memory over what was resident before."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.before = status("VmRSS")
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")

    def over(self) -> int:
        return status("VmHWM") - self.before


def work(job: Job) -> dict[str, Any]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    import holdfast
    import holdfast.session.checkpointer
    from bench.lib.state import State

    act, who = job.phase.split()
    dim = 1 if act == "reshard" else 0
    state = State(job.size, small=job.args.small, dim=dim)
    live = {"state": state.for_dcp()}
    group = dist.new_group(backend="gloo")
    dist.barrier()
    peak = Peak()
    if act == "save" and who == "holdfast":
        with holdfast.Checkpointer(
            job.root / "holdfast", state.for_holdfast(), on_error="raise"
        ) as ckpt:
            for step in (1, 2, 3):
                ckpt.save(step)
                ckpt.wait()
        over = peak.over()
        holdfast.save(job.root / "plain", live, step=1)  # for the loads
    elif act == "save":
        for _ in range(3):
            dcp.async_save(live, checkpoint_id=job.root / "dcp", process_group=group).result()
        over = peak.over()
    elif who == "holdfast":
        holdfast.load(job.root / "plain", live)
        over = peak.over()
    else:
        dcp.load(live, checkpoint_id=job.root / "dcp")
        over = peak.over()
    return {"over": over_ranks(over), "share": over_ranks(state.local_bytes)}


def phases(numbers: list[int]) -> list[tuple[int, str]]:
    return [
        (n, f" {act} {who}") for n in numbers for act, who in CASES if n > 1 or act != "reshard"
    ]


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    names = {"save": "async save", "load": "load", "reshard": "load cut along the other dim"}
    for case, f in found.items():
        ranks, act, who = case.split()
        if who != "holdfast":
            continue
        over, theirs = f["over"] / MIB, found[f"{ranks} {act} dcp"]["over"] / MIB
        what = f"memory over the model's, {names[act]}, {ranks_of(ranks)}"
        if act == "save":
            what += f" (share {f['share'] / MIB:.0f} MiB)"
        out.append(row(what, f"{over:.0f} MiB", f"dcp: {theirs:.0f} MiB", over, " MiB"))
    return out


if __name__ == "__main__":
    main(CLAIMS, __doc__, work, rows, rounds=1, ranks="1,2", phases=phases)
