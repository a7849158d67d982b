"""How long a save holds the training thread, by who moves the state, before and after a change of holdfast.

One step is a real AdamW step; the save is called after it.  *Held* is the time of the call, plus what the
next optimizer's step waits for the copy (event `window.wait`).  Each figure is of a fresh process; with
`--before PATH`, the `src` of another checkout, processes of both take turns.

follows   GPT-2 small and AdamW: an optimizer of the state moves all of it
average   the same model with an average of its weights; beside it, one copy of an average by threads
adapters  a frozen base 20 times as large as what trains
tiny      10,000 parameters, a save at every step: time of a step in all
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.lib.claims import Claim
from bench.lib.common import ROOT, report, reporting, row

CLAIMS = (
    Claim(
        "A save holds the training at most 3 % longer than before writes were copied at the call.",
        r"^(follows|adapters|tiny) \|.*\| before",
        at_most=1.03,
    ),
    Claim(
        "An average beside the optimizer costs one copy by threads more than before, and a tenth.",
        r"^average \|.* more than before",
        at_most=1.1,
    ),
    Claim(
        "A save with an average holds the training for such a copy, and a fifth of it.",
        r"^average \| [\d.]+ ms \| one copy",
        at_most=1.2,
    ),
)

MODULE = "bench.claims.at_call"
KINDS = ("follows", "average", "adapters", "tiny")
SAVES = 8


def build(kind: str, small: bool) -> tuple[dict[str, Any], Any, Any]:
    """The state, its optimizer, and what follows a step."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    if kind == "tiny":
        model: Any = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 10))
    elif kind == "adapters":
        base = nn.ParameterList(
            [nn.Parameter(torch.randn(1 << (18 if small else 20)), False) for _ in range(140)]
        )
        model = nn.ParameterList([nn.Parameter(torch.randn(len(base[0]))) for _ in range(7)])
    else:
        from bench.lib.state import Weights, shapes

        model = Weights({n: torch.randn(s) for n, s in shapes(small).items()})
    optim = torch.optim.AdamW(model.parameters(), lr=1e-4)
    state: dict[str, Any] = {"model": model, "optim": optim}
    if kind == "adapters":
        state["base"] = base
    if kind == "average":
        from torch.optim.swa_utils import AveragedModel

        state["average"] = average = AveragedModel(model)
        return state, optim, lambda: average.update_parameters(model)
    return state, optim, lambda: None


def measure(kind: str, small: bool, root: str) -> dict[str, Any]:
    """Seconds of one process."""
    import torch

    import holdfast
    from holdfast import events
    from holdfast.live.state import snapshot

    state, optim, then = build(kind, small)
    params = [p for g in optim.param_groups for p in g["params"]]
    for p in params:
        p.grad = torch.full_like(p, 1e-3)

    def step() -> None:
        optim.step()
        then()

    step()
    with holdfast.Checkpointer(root, state, keep=holdfast.Keep(last=1), on_error="raise") as ckpt:
        if kind == "tiny":
            return {"held": tiny(ckpt, step)}
        ckpt.save(1).wait()  # allocates, and learns
        step()
        ckpt.save(2).wait()
        step()
        held, waits = [], []
        events.subscribe(lambda e: waits.append(e.duration_s) if e.name == "window.wait" else None)
        for number in range(3, 3 + SAVES):
            step()
            waits.clear()
            began = time.perf_counter()
            save = ckpt.save(number)
            called = time.perf_counter() - began
            time.sleep(
                0.3 if small else 1.5
            )  # less than forward and backward take, beside which it copies
            step()
            held.append(called + sum(waits))
            save.wait()
        found: dict[str, Any] = {"held": median(held)}
    if kind == "average" and hasattr(snapshot, "copy_at_once"):
        found["copy"] = one_copy(list(state["average"].parameters()))
    return found


def tiny(ckpt: Any, step: Any) -> float:
    times = []
    for number in range(1, 400):
        began = time.perf_counter()
        time.sleep(0.001)
        step()
        ckpt.save(number)
        times.append(time.perf_counter() - began)
    ckpt.wait()
    return sum(times[100:]) / len(times[100:])


def one_copy(tensors: list[Any]) -> float:
    """Seconds of one copy by several threads, into memory that is there."""
    import torch

    from holdfast.live.state import snapshot

    sources = [t.detach() for t in tensors]
    into = [torch.empty_like(t) for t in sources]
    times = []
    for _ in range(4):
        began = time.perf_counter()
        snapshot.copy_at_once(into, sources)
        times.append(time.perf_counter() - began)
    return median(times[1:])


def main() -> None:
    p = reporting(__doc__)
    p.add_argument("--before", type=Path, help="the src folder of another checkout")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--small", action="store_true", help="a tenth of the state")
    p.add_argument("--kinds", default=",".join(KINDS))
    p.add_argument("--one", help="kind that this process measures")
    args = p.parse_args()
    if args.one:
        with tempfile.TemporaryDirectory(dir=ROOT.parent) as root:
            print(json.dumps(measure(args.one, args.small, root)))
        return
    sources = {"after": ROOT / "src"} | ({"before": args.before} if args.before else {})
    started = time.time()
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for number in range(args.rounds):
        for kind in args.kinds.split(","):
            for name in sorted(sources, reverse=bool(number % 2)):
                environment = os.environ | {
                    "PYTHONPATH": str(sources[name]),
                    "PYTHONWARNINGS": "ignore",
                }
                command = [sys.executable, "-m", MODULE, "--one", kind] + ["--small"] * args.small
                done = subprocess.run(command, env=environment, capture_output=True, text=True)
                if done.returncode and name == "after":
                    sys.exit(done.stderr)
                if not done.returncode:
                    figures = json.loads(done.stdout.splitlines()[-1])
                    found.setdefault(kind, {}).setdefault(name, []).append(figures)
    args.before = args.before and "another checkout"
    report(CLAIMS, __doc__, args, found, rows(found), started)


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    for kind, names in found.items():
        after = [one["held"] for one in names["after"]]
        text = f"{median(after) * 1e3:.2f} ms"
        if "before" in names:
            before = [one["held"] for one in names["before"]]
            value = median(a / b for a, b in zip(after, before))
            out.append(row(kind, text, f"before: {median(before) * 1e3:.2f} ms", value))
        if kind == "average" and "before" in names:
            copies = [one["copy"] for one in names["after"]]
            value = median((a - b) / c for a, b, c in zip(after, before, copies))
            added = f"{(median(after) - median(before)) * 1e3:.2f} ms more than before"
            out.append(row(kind, added, f"one copy: {median(copies) * 1e3:.2f} ms", value))
        if kind == "average":
            copies = [one["copy"] for one in names["after"] if "copy" in one]
            value = median(a / b for a, b in zip(after, copies))
            out.append(row(kind, text, f"one copy: {median(copies) * 1e3:.2f} ms", value))
    return out


if __name__ == "__main__":
    main()
