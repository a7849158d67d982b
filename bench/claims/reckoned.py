"""How long records hold a training on a device, by the clock of a simulated one (`tests/system/late`).

No time is measured: each kernel, copy and call moves the clock of its stream or thread by what it would
take on an H100 (3 TB/s, 50 GB/s to page-locked memory, 5 GB/s to other memory, 5 us for a launch), and
waits carry a clock from one to the other.  The state is a hundredth of 0.37 B parameters, at a hundredth of
the rates.

none      no records
anew      records; gradients are made anew for each step
stays     records; gradients stay, and are written to again
granted   the same, with Delta(device_bytes=) for a copy on the device
feed      snapshots in memory from gradients (Memory(feed="gradient")), of either kind

`pageable` has host memory that cannot be page-locked.  A step computes for `--compute` seconds.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from statistics import median
from typing import Any

from bench.lib.claims import Claim
from bench.lib.common import ROOT, report, reporting, row

CLAIMS = (
    Claim(
        "On a device, records of gradients that are made anew, or have a grant, add 1.5 % to a step.",
        r"^records, (anew|granted), (\w+) \|",
        at_most=1.015,
    ),
    Claim(
        "On a device, snapshots from gradients that are made anew add 2 % to a step.",
        r"^feed anew, pinned",  # they go to memory that torch has locked, or fail
        at_most=1.02,
    ),
)
TESTS = ROOT / "tests"
DEVICE = "late:0"
SCALE = 100
PARAMETERS = 370_000_000 // SCALE
TENSORS = 100
STEPS, WARM = 12, 6
RATES = (5e-6, 4e14 / SCALE, 3e12 / SCALE, 5e10 / SCALE, 5e9 / SCALE)
MEMORY = ("pinned", "pageable")
WAYS = ("none", "anew", "stays", "granted", "feed anew", "feed stays")


class Training:
    """Parameters and their optimizer, whose forward and backward pass take reckoned time alone."""

    def __init__(self, core: Any, compute_s: float, *, stays: bool) -> None:
        import torch

        self.core, self.compute_s, self.stays = core, compute_s, stays
        size = PARAMETERS // TENSORS
        made = [torch.full((size,), 0.01, device=DEVICE) for _ in range(TENSORS)]
        self.params = torch.nn.ParameterList(torch.nn.Parameter(one) for one in made)
        self.optimizer = torch.optim.AdamW(self.params.parameters(), foreach=True)

    def step(self) -> None:
        import torch

        self.optimizer.zero_grad(set_to_none=not self.stays)
        self.core.work(self.compute_s)
        with torch.no_grad():
            for p in self.params:
                if p.grad is None:
                    p.grad = p * 0.1
                else:
                    p.grad.add_(p, alpha=0.1)
        self.optimizer.step()


def reckoned(core: Any, way: str, compute_s: float) -> dict[str, float]:
    """Median seconds of a step on the training's stream, and of the training thread's waits in it."""
    import holdfast

    run = Training(core, compute_s, stays=way.endswith("stays") or way == "granted")
    state = {"model": run.params, "optim": run.optimizer}
    grant = PARAMETERS * 4 * 2 if way == "granted" else 0
    options: dict[str, Any] = {}
    if way.startswith("feed"):
        options["memory"] = holdfast.Memory("none", feed="gradient")
        options["every"] = holdfast.Every(memory=1)
    elif way != "none":
        options["every"] = holdfast.Every(durable=100, delta=1)
        options["delta"] = holdfast.Delta(device_bytes=grant)
    me, ends, held = threading.get_native_id(), [], []
    with (
        tempfile.TemporaryDirectory() as root,
        holdfast.Checkpointer(root, state, **options) as ckpt,
    ):
        for step in range(1, STEPS + 1):
            before = len(core.waits())
            run.step()
            if way != "none":
                ckpt.step(step)
                ckpt.wait() if step == 1 else None
            mine = [s for _, thread, s in core.waits()[before:] if thread == me]
            ends.append(core.stream_s(0, 0))
            held.append(sum(mine))
    lengths = [b - a for a, b in zip(ends[WARM:], ends[WARM + 1 :])]
    return {"step_s": median(lengths), "held_s": median(held[WARM:])}


def main() -> None:
    started = time.time()
    p = reporting(__doc__)
    p.add_argument("--compute", type=float, default=0.25, help="seconds of a step's passes (0.25)")
    args = p.parse_args()
    sys.path.insert(0, str(TESTS))
    from system.late import device

    found: dict[str, Any] = {"parameters": PARAMETERS * SCALE}
    rows = []
    device.core.set_rates(*RATES)
    for memory in MEMORY:
        device.lock_pages(memory == "pinned")
        of = found[memory] = {way: reckoned(device.core, way, args.compute) for way in WAYS}
        base = of["none"]["step_s"]
        for way in WAYS[1:]:
            step_s, held_s = of[way]["step_s"], of[way]["held_s"]
            rows.append(
                row(
                    f"{way if way.startswith('feed') else f'records, {way}'}, {memory}",
                    f"step {step_s * 1e3:.1f} ms, thread held {held_s * 1e3:.2f} ms of it",
                    f"without: {base * 1e3:.1f} ms",
                    max(step_s, base + held_s) / base,
                )
            )
    report(CLAIMS, __doc__, args, found, rows, started)


if __name__ == "__main__":
    main()
