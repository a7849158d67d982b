"""Many small tensors: microseconds for each, in a first save and in a load, beside torch's DCP.

A model of n parameters with 8 elements each on one rank, in shared memory, so that storage takes no time:
what is left is the price of a tensor.  Each `holdfast.save` plans anew, as a run's first save does.

holdfast   holdfast.save, and holdfast.load into the live model; every byte is verified by its digest.
dcp        torch.distributed.checkpoint.save and load, in place.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from bench.lib.claims import Claim
from bench.lib.common import Job, main, over_ranks, ratio, row, settle, slowest, take_turns

CLAIMS = (
    Claim(
        "A first save, and a load, of many small tensors take 20 us for each.",
        r"^(.+), each \|",
        at_most=20,
        unit="us",
    ),
)
NUMBERS = (10_000, 100_000)
ELEMENTS = 8


def work(job: Job) -> dict[str, Any]:
    import torch
    import torch.distributed.checkpoint as dcp

    import holdfast

    root = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir="/dev/shm"))
    found = {}
    for number in NUMBERS:
        n = number // 10 if job.args.small else number
        params = [torch.nn.Parameter(torch.randn(ELEMENTS)) for _ in range(n)]
        model = torch.nn.ParameterList(params)
        expected = torch.stack(list(params)).detach().clone()
        holdfast.save(root / "holdfast", {"model": model}, step=1)
        dcp.save({"model": model.state_dict()}, checkpoint_id=root / "dcp")

        def timed(act: Any, loads: bool) -> Any:
            def run(_: int) -> float:
                if loads:
                    with torch.no_grad():
                        torch._foreach_zero_(params)
                took = slowest(act)
                assert torch.equal(torch.stack(list(params)), expected), "other values"
                return took

            return run

        acts = {
            ("save", "holdfast"): lambda: holdfast.save(
                root / "holdfast", {"model": model}, step=1
            ),
            ("save", "dcp"): lambda: dcp.save(
                {"model": model.state_dict()}, checkpoint_id=root / "dcp"
            ),
            ("load", "holdfast"): lambda: holdfast.load(root / "holdfast", {"model": model}),
            ("load", "dcp"): lambda: dcp.load(
                {"model": model.state_dict()}, checkpoint_id=root / "dcp"
            ),
        }
        found[str(n)] = {
            kind: take_turns(
                {who: timed(act, k == "load") for (k, who), act in acts.items() if k == kind},
                job.args.rounds,
            )
            for kind in ("save", "load")
        }
        settle(job, root / "holdfast", root / "dcp")
    root.rmdir()
    return {"elements": over_ranks(ELEMENTS), "samples": found}


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    for f in found.values():
        for n, kinds in f["samples"].items():
            for kind, samples in kinds.items():
                per = {who: 1e6 * sorted(s)[len(s) // 2] / int(n) for who, s in samples.items()}
                what = f"{'first save' if kind == 'save' else 'load'} of {int(n):,} small tensors"
                ours, other = (f"{per[who]:.1f} us a tensor" for who in ("holdfast", "dcp"))
                out.append(row(what, ours, f"dcp: {other}", ratio(samples, "dcp", "holdfast")))
                out.append(row(f"{what}, each", ours, "", per["holdfast"], " us"))
    return out


if __name__ == "__main__":
    main(CLAIMS, __doc__, work, rows, rounds=3, ranks="1")
