"""What the benchmarks share: starting ranks, taking turns, reports.

A script calls `main(...)`.  Started by hand it is the *driver*: it starts itself once per number of ranks
under torchrun, collects what rank 0 found, prints its rows and its claims, and writes a record, by default
`bench/results/<name>.json`.  Started by the driver it is a *worker* and calls the script's `work(job)`.

All contestants of a script take turns inside one run, round after round, each round in another order, so
that drift of the machine hits all.  A time is that of the slowest rank, from a barrier on.  Ratios are
taken round by round; their median is what counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.lib.claims import RESULTS, ROOT, TRIED, Claim, judge, table

MIB, GB = 1 << 20, 1e9
Seconds = dict[str, list[float]]


@dataclass
class Job:
    """One worker's view: who it is, where files go (by number of ranks), what was asked for."""

    rank: int
    size: int
    root: Path
    phase: str
    args: argparse.Namespace


# -- driver ---------------------------------------------------------------------------------------


class _Unused(argparse.Action):
    """An option that `python -m bench` hands to all scripts, and this one has no use for."""

    def __call__(self, parser: Any, _namespace: Any, _values: Any, option: Any = None) -> None:
        print(f"{parser.prog} only computes: {option} changes nothing", flush=True)


def reporting(doc: str | None) -> argparse.ArgumentParser:
    """For a script that only computes."""
    p = _reporting(doc)
    for option, number in (("--root", 1), ("--rounds", 1), ("--small", 0)):
        p.add_argument(option, nargs=number, action=_Unused, help=argparse.SUPPRESS)
    p.set_defaults(root=None, small=False)
    return p


def _reporting(doc: str | None) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler="resolve",  # a script may have an option of all in its own way
    )
    p.add_argument(
        "--out",
        type=Path,
        help="where the record goes (default: bench/results; build/bench if --small)",
    )
    p.add_argument("--name", default=Path(sys.argv[0]).stem, help="of the record")
    return p


def measuring(doc: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """For a script that measures a disk, in rounds."""
    p = _reporting(doc)
    p.add_argument(
        "--root",
        help="an existing directory on the disk to be measured "
        "(default: beside the repository); a folder is made in it and removed at the end",
    )
    p.add_argument("--rounds", type=int, default=rounds, help=f"default: {rounds}")
    p.add_argument(
        "--small", action="store_true", help="a tenth of the state, to try the script out"
    )
    return p


def parser(doc: str | None, *, rounds: int, ranks: str) -> argparse.ArgumentParser:
    """For a script that starts ranks."""
    p = measuring(doc, rounds=rounds)
    p.add_argument("--ranks", default=ranks, help=f"numbers of ranks, by comma (default: {ranks})")
    p.add_argument("--worker", help=argparse.SUPPRESS)
    p.add_argument("--phase", default="", help=argparse.SUPPRESS)
    return p


def with_compute(p: argparse.ArgumentParser) -> None:
    """For `main(extend=...)`: how long a step computes."""
    p.add_argument(
        "--compute", type=float, default=1.0, help="seconds of computing per step (default: 1)"
    )


@contextmanager
def scratch(args: argparse.Namespace) -> Iterator[Path]:
    """A folder on the disk to be measured, removed at the end, after SIGTERM too."""
    root = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=args.root or ROOT.parent))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def main(
    claims: tuple[Claim, ...],
    doc: str | None,
    work: Callable[[Job], dict[str, Any]],
    rows: Callable[[dict[str, Any]], list[dict[str, Any]]],
    *,
    rounds: int = 5,
    ranks: str = "1,2,4",
    phases: Callable[[list[int]], list[tuple[int, str]]] | None = None,
    extend: Callable[[argparse.ArgumentParser], None] | None = None,
    restarts: Callable[[argparse.Namespace, str], int] | None = None,
    chosen: Callable[[argparse.Namespace, str], bool] | None = None,
    in_place: Callable[[str], bool] | None = None,
) -> None:
    """Be the driver or a worker.  `phases`: (ranks, phase) to start, in order; default one per number.
    `restarts`: how often torchrun starts the ranks of a phase again when one has died; default never.
    `chosen`: which phases were asked for.  `in_place`: those that run under `holdfast run`.

    `work` returns a JSON-able dict on rank 0; `rows` makes table rows of all of them, by `<ranks><phase>`.
    """
    p = parser(doc, rounds=rounds, ranks=ranks)
    if extend:
        extend(p)
    args = p.parse_args()
    if args.worker:
        _worker(args, work, in_place is not None and in_place(args.phase))
        return
    numbers = [int(n) for n in args.ranks.split(",")]
    runs = phases(numbers) if phases else [(n, "") for n in numbers]
    started, found = time.time(), {}
    with scratch(args) as root:
        for number, phase in runs:
            if chosen is None or chosen(args, phase):
                again = restarts(args, phase) if restarts else 0
                is_in_place = in_place is not None and in_place(phase)
                own = root / str(number)
                own.mkdir(exist_ok=True)
                found[f"{number}{phase}"] = _launch(number, phase, own, again, is_in_place)
    report(claims, doc, args, found, rows(found), started)


def _launch(ranks: int, phase: str, root: Path, restarts: int, is_in_place: bool) -> dict[str, Any]:
    """This script on `ranks` ranks; what its rank 0 found."""
    out = root / "worker.json"
    env = os.environ | {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
        "PYTHONWARNINGS": "ignore",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else gloo fails after a restart
    }
    launcher = ["holdfast", "run", "--spares=1"] if is_in_place else ["torch.distributed.run"]
    command = [sys.executable, "-m", *launcher, "--standalone"]
    command += [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    command += ["-m", sys.modules["__main__"].__spec__.name, *sys.argv[1:]]
    command += ["--root", str(root), "--worker", str(out), "--phase", phase]
    process = subprocess.Popen(command, env=env)
    try:
        failed = process.wait()
    finally:
        process.terminate()  # torchrun then ends its workers; killed, it would leave them behind
        process.wait()
    if failed:
        sys.exit(f"{' '.join(command)}: exit status {failed}")
    return json.loads(out.read_text())


def folder_of(args: argparse.Namespace) -> Path:
    """Where the record goes; made if it is not there."""
    out = args.out or (TRIED if args.small else RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    return out


def report(
    claims: tuple[Claim, ...],
    doc: str | None,
    args: argparse.Namespace,
    found: dict[str, Any],
    rows: list[dict[str, Any]],
    started: float,
) -> None:
    """Print the rows and which claims hold, and write the record."""
    own = ("root", "out", "name", "peers", "worker", "phase")
    result = {
        "name": args.name,
        "what": (doc or "").strip().splitlines()[0],
        "machine": machine(args.root or ROOT.parent),
        "arguments": {k: v for k, v in vars(args).items() if k not in own},
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "seconds": round(time.time() - started, 1),
        "found": found,
        "rows": rows,
    }
    (folder_of(args) / f"{args.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{args.name} ({result['seconds']} s)\n")
    for r in rows:
        print(f"{r['what']} | {r['holdfast']} | {r['against']} | {r['value']:.3g}{r['unit']}")
    if args.small:
        print("\nTried with --small: no result.", flush=True)
        return
    script = Path(sys.argv[0]).stem
    print("\n" + table(judge(script, claim, [result]) for claim in claims), flush=True)


def row(what: str, ours: str, other: str, value: float, unit: str = " x") -> dict[str, Any]:
    """A row of the record: who took what, and the value that a claim may be about."""
    return {"what": what, "holdfast": ours, "against": other, "value": value, "unit": unit}


def ranks_of(number: str) -> str:
    """As in `4 ranks`."""
    return f"{number} rank{'s' * (number != '1')}"


def machine(root: str | Path) -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    import holdfast

    text = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    models = {
        line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")
    }
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    disk = subprocess.run(["df", "-T", str(root)], capture_output=True, text=True, check=False)
    return {
        "cpu": ", ".join(sorted(models)) or platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / (1 << 30), 1),
        "disk": " ".join(disk.stdout.splitlines()[-1].split()[:2]) if disk.stdout else "",
        "load_average": os.getloadavg(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "holdfast": holdfast.__version__,
    }


# -- worker ---------------------------------------------------------------------------------------


def _worker(
    args: argparse.Namespace, work: Callable[[Job], dict[str, Any]], is_in_place: bool
) -> None:
    if is_in_place:
        import holdfast

        holdfast.recoverable(_work)(args, work)
    else:
        _work(args, work)


def _work(args: argparse.Namespace, work: Callable[[Job], dict[str, Any]]) -> None:
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    job = Job(dist.get_rank(), dist.get_world_size(), Path(args.root), args.phase, args)
    try:
        found = work(job)
        if job.rank == 0:
            Path(args.worker).write_text(json.dumps(found))
        dist.barrier()
    except Exception:
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def slowest(work: Callable[[], Any]) -> float:
    """Seconds from a barrier until the slowest rank is done.

    Python's garbage is collected before: else it falls, for 200 ms, on whoever comes by.
    """
    import torch.distributed as dist

    gc.collect()
    dist.barrier()
    started = time.perf_counter()
    work()
    return over_ranks(time.perf_counter() - started)


def over_ranks(value: float, how: str = "MAX") -> float:
    import torch
    import torch.distributed as dist

    data = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(data, getattr(dist.ReduceOp, how))
    return float(data)


def shared_memory() -> Path:
    """A folder in memory of this job's own."""
    return Path("/dev/shm") / f"holdfast-bench-{os.environ['TORCHELASTIC_RUN_ID']}"


def settle(job: Job, *remove: Path) -> None:
    """Leave nothing for the next contestant to pay for: files gone, dirty pages written."""
    import torch.distributed as dist

    dist.barrier()
    if job.rank == 0:
        for path in remove:
            shutil.rmtree(path, ignore_errors=True)
        os.sync()
    dist.barrier()


def take_turns(contestants: dict[str, Callable[[int], float]], rounds: int) -> Seconds:
    """Run everybody once per round, each round in another order.

    In a rotation everybody would always follow the same one, and a disk with a budget makes the next
    one pay.  So orders are the rows of a Williams square: in each cycle of rounds everybody is as often
    in each place, and follows each other one equally often.
    """
    names, samples = list(contestants), {name: [] for name in contestants}
    orders = williams(len(names))
    for number in range(rounds):
        for i in orders[number % len(orders)]:
            samples[names[i]].append(contestants[names[i]](number))
    return samples


def williams(n: int) -> list[list[int]]:
    """n orders of 0..n-1, or 2 n if n is odd, balanced in place and in neighbours."""
    first = [i // 2 if i % 2 == 0 else n - 1 - i // 2 for i in range(n)]
    rows = [[(x + shift) % n for x in first] for shift in range(n)]
    return rows + [row[::-1] for row in rows] if n % 2 else rows


def ratio(samples: Seconds, over: str, under: str) -> float:
    """Median over the rounds of one's time over another's."""
    return median(a / b for a, b in zip(samples[over], samples[under]))


def seconds(samples: Seconds, name: str, num_bytes: int = 0) -> str:
    """The median as text, with GB/s if bytes are given."""
    middle = median(samples[name])
    text = f"{middle:.2f} s" if middle >= 0.1 else f"{middle * 1e3:.1f} ms"
    return text + (f" ({num_bytes / middle / GB:.2f} GB/s)" if num_bytes else "")
