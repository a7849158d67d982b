"""Converting what DeepSpeed saved: holdfast against `ds_to_universal`, and against the raw device.

Sources are ZeRO stages 1, 2 and 3 of 2 ranks, made by DeepSpeed itself (bench/lib/zero_state.py).  Whole
processes are timed, sources in the page cache.  `ds_to_universal` runs with several numbers of workers in
the first round, and with the best of them after.  `raw` reads the bytes that the conversion needs and
writes as many, with O_DIRECT, in several threads: what the disk can do; there, the time inside the process
counts for both.  Peak memory is that of all processes together; disk is the most that was there.

6 GB: `python -m bench.claims.convert --stages 1 --width 1280 --layers 20 --name convert_6gb`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.lib.claims import Claim
from bench.lib.common import (
    MIB,
    Seconds,
    measuring,
    ratio,
    report,
    row,
    scratch,
    seconds,
    take_turns,
)
from bench.lib.files import files_below, warm
from bench.lib.watching import Watched, watch
from bench.lib.zero_state import make

RECORDS = ("convert", "convert_6gb")
CLAIMS = (
    Claim(
        "A conversion, read back from the disk, takes an eighth of ds_to_universal's time.",
        r"^convert (.+), to consolidated \|",
        at_least=8,
        records=RECORDS,
    ),
    Claim(
        "A conversion, not read back, takes an eighth of ds_to_universal's time.",
        r"^convert (.+), to consolidated, not read back \|",
        at_least=8,
        records=RECORDS,
    ),
    Claim(
        "A conversion, not read back, has 0.7 of the speed of a raw copy.",
        r"^convert (.+), not read back, vs raw copy",
        at_least=0.7,
        records=RECORDS,
    ),
    Claim(
        "A conversion keeps within --memory.",
        r"^memory, (.+) \(--memory 256MiB\)",
        at_most=256,
        unit="MiB",
        records=RECORDS,
    ),
    Claim(
        "A conversion takes no more of the disk than its result.",
        r"^disk at its fullest, (.+?) \|",
        at_most=1.01,
        records=RECORDS,
    ),
)

WORKERS = ((4, 2), (2, 2), (2, 1))
MEMORY = "256MiB"
PEER = "ds_to_universal"


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
        command = [sys.executable, "-m", "bench.lib.raw_copy", str(self.source)]
        return self._watch("raw", [*command, str(self.root / "out"), str(size)])

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
                    ratio(f["seconds"], PEER, name))
            )  # fmt: skip
        for name, title in (("universal", "read back"), ("unread", "not read back")):
            out.append(
                row(f"convert {what}, {title}, vs raw copy", seconds(f["inner"], name, size),
                    f"raw {seconds(f['inner'], 'raw', size)}", ratio(f["inner"], "raw", name))
            )  # fmt: skip
        out.append(
            row(f"memory, {what} (--memory {MEMORY})", f"{f['peak']['universal'] / MIB:.0f} MiB",
                f"{PEER} {f['peak'][PEER] / MIB:.0f} MiB", f["peak"]["universal"] / MIB, " MiB")
        )  # fmt: skip
        out.append(
            row(f"disk at its fullest, {what}", f"{f['disk']['universal'] / 1e9:.2f} GB",
                f"{PEER} {f['disk'][PEER] / f['size'][PEER]:.2f} x its result",
                f["disk"]["universal"] / f["size"]["universal"])
        )  # fmt: skip
    return out


def main() -> None:
    p = measuring(__doc__, rounds=3)
    p.add_argument("--stages", default="1,2,3")
    p.add_argument("--width", type=int, default=768)
    p.add_argument("--layers", type=int, default=12)
    args = p.parse_args()
    width, layers = (256, 4) if args.small else (args.width, args.layers)
    started, found = time.time(), {}
    with scratch(args) as root:
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
    report(CLAIMS, __doc__, args, found, rows(found), started)


if __name__ == "__main__":
    main()
