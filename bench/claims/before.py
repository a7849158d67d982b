"""What a change of holdfast costs: the same work by this checkout and by another one, in turns.

save      a durable save of GPT-2 small and its AdamW states, one rank
load      a load of it, in the page cache
held      until that save's call has returned and the optimizer has made its next step
many      a first save of 10,000 tensors of 8 elements each, one rank, in shared memory
records   a step of AdamW over the small state, with a record of it
first     two ranks: from `Checkpointer()` to the first save of a tiny state, which is their first message
rounds    two ranks: a save of a tiny state later, each of which is some messages
restart   two ranks under `holdfast run`, one is killed: until the next step of both
import    a new interpreter that imports holdfast alone
ls        `holdfast ls` of a root with one step
inspect   `holdfast inspect` of it

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
        r"^(save|load|held|many|records|first|rounds|restart|import|ls|inspect) \|",
        at_most=1.03,
        records=("before", "before_restart"),
    ),
)
MODULE = "bench.claims.before"

ALONE = ("save", "load", "held", "records")
COMMANDS = ("import", "ls", "inspect")
KINDS = (*ALONE, "many", "first", "rounds", "restart", *COMMANDS)
REPEATS = {"save": 4, "load": 6, "held": 4, "records": 20, "rounds": 60}


def alone(kind: str, root: Path) -> float:
    """Median seconds of saves, loads, or steps beside them."""
    import torch

    import holdfast
    from bench.lib.state import Weights, shapes

    small = kind == "records"
    model = Weights({n: torch.randn(s) for n, s in shapes(small=small).items()})
    optim = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-3)
    optim.step()
    state, times = {"model": model, "optim": optim}, []
    options: dict[str, Any] = {"keep": holdfast.Keep(last=1)}
    if kind == "records":
        options |= {"every": holdfast.Every(delta=1), "delta": holdfast.Delta()}
    with holdfast.Checkpointer(root, state, **options) as ckpt:
        ckpt.save(1).wait()
        for number in range(2, REPEATS[kind] + 2):
            if kind != "records":
                optim.step()
            began = time.perf_counter()
            if kind == "save":
                ckpt.save(number).wait()
            elif kind == "held":
                ckpt.save(number)
                optim.step()
            elif kind == "records":
                optim.step()
                ckpt.step(number)
            else:
                holdfast.load(root, state)
            times.append(time.perf_counter() - began)
            ckpt.wait()
    return median(times)


def many() -> float:
    """Seconds of a first save of many small tensors."""
    import torch

    import holdfast

    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(8)) for _ in range(10_000)])
    times = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for number in range(3):  # the first of a process also imports
            began = time.perf_counter()
            holdfast.save(Path(folder, str(number)), {"model": model}, step=1)
            times.append(time.perf_counter() - began)
    return median(times)


def command(kind: str, root: Path) -> float:
    """Median seconds of a command in a new interpreter."""
    if kind == "import":
        words = ["-c", "import holdfast"]
    else:
        import torch

        import holdfast

        holdfast.save(root, {"model": torch.nn.Linear(3, 3)}, step=1)
        words = ["-m", "holdfast", kind, str(root)]
    times = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True)
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
    if kind == "many":
        return many()
    if kind in COMMANDS:
        return command(kind, root)
    return alone(kind, root) if kind in ALONE else ranks(kind, root)


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
    environment: dict[str, Any] = {
        name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    } | {
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
