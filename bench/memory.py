"""Host memory: the peak of a save and of a load over what the model itself takes, per rank.

Each case runs in fresh processes.  After the state is made (and freed memory given back), the kernel's
high-water mark of resident memory is reset; the figure is that mark after the operation less what was
resident before it, of the worst rank.  Three saves in a row; loads are in place; the page cache does not
count.  Targets: an asynchronous save takes at most the rank's share of the state and 64 MiB; a load at
most 256 MiB.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Any

from common import MIB, Job, main, over_ranks, row

CASES = (
    ("save", "holdfast"), ("save", "dcp"),
    ("load", "holdfast"), ("load", "dcp"),
    ("reshard", "holdfast"), ("reshard", "dcp"),
)  # fmt: skip


def status(name: str) -> int:
    """A line of /proc/self/status in bytes: VmHWM, VmRSS, RssAnon, ..."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith(name + ":"))


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
    from state import State

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
        share = f["share"] / MIB
        limit = f"<= {share + 64:.0f} MiB" if act == "save" else "<= 256 MiB"
        what = f"memory over the model's, {names[act]}, {ranks} rank{'s' * (ranks != '1')}"
        if act == "save":
            what += f" (share {share:.0f} MiB)"
        out.append(row(what, f"{over:.0f} MiB", f"dcp: {theirs:.0f} MiB", over, limit, " MiB"))
    return out


if __name__ == "__main__":
    main("memory", __doc__, work, rows, rounds=1, ranks="1,2", phases=phases)
