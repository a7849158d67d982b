"""What a change of holdfast costs: the same work by this checkout and by another one, in turns.

save      a durable save of GPT-2 small and its AdamW states, one rank
load      a load of it, in the page cache
first     two ranks: from `Checkpointer()` to the first save of a tiny state, which is their first message
rounds    two ranks: a save of a tiny state later, each of which is some messages
restart   two ranks under `holdfast run`, one is killed: until the next step of both

Each figure is of a fresh process with one checkout's sources; `--before PATH` is the `src` of the other.
"""

from __future__ import annotations

import json
import os
import signal
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
        "This checkout takes at most 3 % longer than the other one.",
        r"^(save|load|first|rounds|restart) \|",
        at_most=1.03,
        records=("before", "before_restart"),
    ),
)
MODULE = "bench.claims.before"

KINDS = ("save", "load", "first", "rounds", "restart")
REPEATS = {"save": 4, "load": 6, "rounds": 60}


def alone(kind: str, root: Path) -> float:
    """Median seconds of saves or loads."""
    import torch

    import holdfast
    from bench.lib.state import Weights, shapes

    model = Weights({n: torch.randn(s) for n, s in shapes(small=False).items()})
    optim = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-3)
    optim.step()
    state, times = {"model": model, "optim": optim}, []
    with holdfast.Checkpointer(root, state, keep=holdfast.Keep(last=1)) as ckpt:
        ckpt.save(1).wait()
        for number in range(REPEATS[kind]):
            optim.step()
            began = time.perf_counter()
            if kind == "save":
                ckpt.save(number + 2).wait()
            else:
                holdfast.load(root, state)
            times.append(time.perf_counter() - began)
    return median(times)


def ranks(kind: str, root: Path) -> float:
    """The same of two ranks, which this starts."""
    from socket import socket

    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    common["LOCAL_WORLD_SIZE"] = "2"
    started = [
        subprocess.Popen(
            [sys.executable, "-m", MODULE, "--one", f"rank-{kind}", "--at", str(root)],
            env={**common, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    lines = [process.communicate(timeout=120)[0] for process in started]
    return max(float(line.splitlines()[-1]) for line in lines)


def rank(kind: str, root: Path) -> float:
    """Seconds of one of them."""
    import torch
    import torch.distributed as dist

    import holdfast

    dist.init_process_group("gloo")
    w = torch.zeros(1000)
    dist.barrier()
    began = time.perf_counter()
    times = []
    with holdfast.Checkpointer(root, {"w": w}, keep=holdfast.Keep(last=1)) as ckpt:
        ckpt.save(1).wait()
        first = time.perf_counter() - began
        for number in range(REPEATS["rounds"] if kind == "rounds" else 0):
            began = time.perf_counter()
            ckpt.save(number + 2).wait()
            times.append(time.perf_counter() - began)
    dist.destroy_process_group()
    return median(times) if times else first


def restart(root: Path) -> float:
    """Seconds from a kill to the next step of both ranks."""
    command = [sys.executable, "-m", "holdfast", "run", "--spares=1", "--standalone"]
    command += ["--nproc-per-node=2", "-m", "bench.lib.gpu_train"]
    command += [str(root), "gloo", "kill", "cpu"]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        process.wait(120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    told = [json.loads(line) for line in root.with_suffix(".told").read_text().splitlines()]
    broke = next(one["at"] for one in told if one.get("fault"))
    later = [one for one in told if one.get("step") and one["at"] > broke]
    return float(max(min(x["at"] for x in later if x["rank"] == r) - broke for r in (0, 1)))


def measure(kind: str, root: Path) -> float:
    if kind.startswith("rank-"):
        return rank(kind.removeprefix("rank-"), root)
    if kind == "restart":
        return restart(root)
    return alone(kind, root) if kind in ("save", "load") else ranks(kind, root)


def main() -> None:
    p = reporting(__doc__)
    p.add_argument("--before", type=Path, required=False, help="the src folder of another checkout")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--kinds", default=",".join(KINDS))
    p.add_argument("--one", help="what this process measures")
    p.add_argument("--at", type=Path, help="where it may write")
    args = p.parse_args()
    if args.one:
        print(measure(args.one, args.at))
        return
    sources = {
        "after": ROOT / "src",
        "before": args.before or p.error("--before is missing"),
    }
    started, found = time.time(), {}
    for number in range(args.rounds):
        for kind in args.kinds.split(","):
            for name in sorted(sources, reverse=bool(number % 2)):
                seconds = in_process(kind, sources[name])
                found.setdefault(kind, {}).setdefault(name, []).append(seconds)
    args.at = None
    args.before = "another checkout"
    report(CLAIMS, __doc__, args, found, rows(found), started)


def in_process(kind: str, source: Path) -> float:
    environment: dict[str, Any] = os.environ | {
        "PYTHONPATH": str(source),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory(dir=ROOT.parent) as folder:
        command = [sys.executable, "-m", MODULE, "--one", kind, "--at", str(Path(folder, "root"))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        return float(done.stdout.splitlines()[-1])


def rows(found: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    def text(samples: list[float]) -> str:
        return f"{median(samples) * 1e3:.1f} ms"

    return [
        row(
            kind,
            text(samples["after"]),
            f"before {text(samples['before'])}",
            median(a / b for a, b in zip(samples["after"], samples["before"])),
        )
        for kind, samples in found.items()
    ]


if __name__ == "__main__":
    main()
