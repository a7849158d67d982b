"""Converting what DeepSpeed saved: holdfast against `ds_to_universal`, and against the raw device.

Sources are ZeRO stages 1, 2 and 3 of 2 ranks, made by DeepSpeed itself (bench/zero_state.py).  Whole
processes are timed, sources in the page cache.  `ds_to_universal` runs with several numbers of workers in
the first round, and with the best of them after.  `raw` reads the bytes that the conversion needs and
writes as many, with O_DIRECT, in several threads: what the disk can do; there, the time inside the process
counts for both.  Peak memory is that of all processes together; disk is the most that was there.

6 GB: `bench/convert.py --stages 1 --width 1280 --layers 20 --name convert_6gb`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import HERE, MIB, RESULTS, Seconds, ratio, report, row, seconds, take_turns
from files import files_below, warm
from watching import Watched, watch

WORKERS = ((4, 2), (2, 2), (2, 1))
MEMORY = "256MiB"
PEER = "ds_to_universal"


def make(folder: Path, stage: int, width: int, layers: int) -> Path:
    """A checkpoint by DeepSpeed on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(HERE / "zero_state.py"), str(folder), f"--stage={stage}"]
    watch([*command, f"--width={width}", f"--layers={layers}"], env={"PYTHONWARNINGS": "ignore"})
    return folder


def named(workers: tuple[int, int]) -> str:
    return f"{workers[0]} x {workers[1]}"


class Contest:
    """One source, and everybody who converts it."""

    def __init__(self, source: Path, root: Path, stage: int) -> None:
        self.source, self.root, self.stage = source, root, stage
        self.seen: dict[str, list[Watched]] = {}
        self.inner: dict[str, list[float]] = {}
        self.sizes: dict[str, int] = {}
        self.best: tuple[int, int] | None = None
        self.tried: dict[str, float] = {}

    def run(self, rounds: int) -> Seconds:
        warm(files_below(self.source))
        return take_turns(
            {
                PEER: self.peer,
                "universal": lambda _: self.holdfast("universal"),
                "unread": lambda _: self.holdfast("universal", "--no-verify"),
                "deepspeed": lambda _: self.holdfast("deepspeed"),
                "raw": self.raw,
            },
            rounds,
        )

    def peer(self, number: int) -> float:
        if number == 0:
            for workers in WORKERS:
                self.tried[named(workers)] = self._peer(workers)
            best = min(self.tried, key=self.tried.__getitem__)
            self.best = next(w for w in WORKERS if named(w) == best)
            return self.tried[best]
        assert self.best
        return self._peer(self.best)

    def _peer(self, workers: tuple[int, int]) -> float:
        tag = (self.source / "latest").read_text()
        command = [sys.executable, "-W", "ignore", "-m", "deepspeed.checkpoint.ds_to_universal"]
        command += [
            "--input_folder",
            str(self.source / tag),
            "--output_folder",
            str(self.root / "out"),
        ]
        command += ["--inject_missing_state", f"--num_extract_workers={workers[0]}"]
        return self._watch(PEER, [*command, f"--num_merge_workers={workers[1]}"])

    def holdfast(self, to: str, *options: str) -> float:
        name = "unread" if options else to
        command = [sys.executable, "-c", "from holdfast.cli.main import main; main()", "convert"]
        command += [
            str(self.source),
            str(self.root / "out"),
            "--to",
            to,
            "--memory",
            MEMORY,
            "--json",
        ]
        return self._watch(name, [*command, *options])

    def raw(self, _: int) -> float:
        size = self.sizes.get("universal") or 1 << 30
        command = [
            sys.executable,
            str(HERE / "raw_copy.py"),
            str(self.source),
            str(self.root / "out"),
        ]
        return self._watch("raw", [*command, str(size)])

    def _watch(self, name: str, command: list[str]) -> float:
        out = self.root / "out"
        env = {"DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        seen = watch(command, out, env)
        self.seen.setdefault(name, []).append(seen)
        if name != PEER:
            self.inner.setdefault(name, []).append(json.loads(seen.output)["seconds"])
        self.sizes[name] = (
            sum(f.stat().st_size for f in out.rglob("*") if f.is_file()) or out.stat().st_size
        )
        shutil.rmtree(out) if out.is_dir() else out.unlink()
        os.sync()
        return seen.seconds


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    for key, f in found.items():
        what, size = f"{key}, {f['bytes'] / 1e9:.2f} GB", f["bytes"]
        for name, title in (
            ("universal", "to consolidated"),
            ("unread", "to consolidated, not read back"),
            ("deepspeed", "to DeepSpeed universal"),
        ):
            out.append(
                row(f"convert {what}, {title}", seconds(f["seconds"], name, size),
                    f"{PEER} ({f['workers']} workers) {seconds(f['seconds'], PEER)}",
                    ratio(f["seconds"], PEER, name), "" if name == "deepspeed" else ">= 8")
            )  # fmt: skip
        for name, title in (("universal", "read back"), ("unread", "not read back")):
            out.append(
                row(f"convert {what}, {title}, vs raw copy", seconds(f["inner"], name, size),
                    f"raw {seconds(f['inner'], 'raw', size)}", ratio(f["inner"], "raw", name),
                    ">= 0.7" if name == "unread" else "")
            )  # fmt: skip
        out.append(
            row(f"memory, {what} (--memory {MEMORY})", f"{f['peak']['universal'] / MIB:.0f} MiB",
                f"{PEER} {f['peak'][PEER] / MIB:.0f} MiB", f["peak"]["universal"] / MIB, "", " MiB")
        )  # fmt: skip
        out.append(
            row(f"disk at its fullest, {what}", f"{f['disk']['universal'] / 1e9:.2f} GB",
                f"{PEER} {f['disk'][PEER] / f['size'][PEER]:.2f} x its result",
                f["disk"]["universal"] / f["size"]["universal"], "<= 1.01")
        )  # fmt: skip
    return out


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--root", help="a directory on the disk to be measured")
    p.add_argument("--stages", default="1,2,3")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--width", type=int, default=768)
    p.add_argument("--layers", type=int, default=12)
    p.add_argument("--small", action="store_true", help="a tenth, to try the script out")
    p.add_argument("--name", default="convert")
    p.add_argument("--out", type=Path, default=RESULTS)
    args = p.parse_args()
    width, layers = (256, 4) if args.small else (args.width, args.layers)
    root = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=args.root or HERE.parent.parent))
    started, found = time.time(), {}
    try:
        for stage in map(int, args.stages.split(",")):
            source = make(root / "source", stage, width, layers)
            contest = Contest(source, root, stage)
            turns = contest.run(args.rounds)
            found[f"ZeRO-{stage}"] = {
                "seconds": turns,
                "inner": contest.inner,
                "bytes": contest.sizes["universal"],
                "size": contest.sizes,
                "workers": named(contest.best),
                "tried": contest.tried,
                "peak": {k: max(w.peak_bytes for w in v) for k, v in contest.seen.items()},
                "disk": {k: median(w.disk_bytes for w in v) for k, v in contest.seen.items()},
            }
            shutil.rmtree(source)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    report(args.name, __doc__, args, found, rows(found), started)


if __name__ == "__main__":
    main()
