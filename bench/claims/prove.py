"""What `holdfast prove` takes of examples/train.py, 20 steps with a save each 5: in all, and in each step.

A round runs the training alone to its end, and proves it; steps are those of the run that is not killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

from bench.lib.claims import Claim
from bench.lib.common import ROOT, report, reporting, row

CLAIMS = (
    Claim(
        "A proof takes at most 4.5 times as long as the training, and 15 s.",
        r"^all, less 15 s, (.+?) \|",
        at_most=4.5,
    ),
    Claim("A step that is looked at takes at most twice as long.", r"^a step, (.+?) \|", at_most=2),
)
STEPS = 20
SCRIPT = [
    str(ROOT / "examples" / "train.py"),
    "--root",
    "root",
    "--every",
    "5",
    "--log-file",
    "log",
]
LAYOUTS = {
    "1 rank": [sys.executable],
    "2 ranks": [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ],
}


def took(command: list[str], place: Path) -> float:
    began = time.perf_counter()
    subprocess.run(command, cwd=place, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def step_s(log: Path) -> float:
    """Median seconds from the end of a step to that of the next."""
    lines = map(json.loads, log.read_text().splitlines())
    ends = [line["time"] for line in lines if line["event"] == "step"]
    return median(after - before for before, after in pairwise(ends[1:]))


def measure(launcher: list[str]) -> dict[str, float]:
    """Seconds: of the training and of its proof, and of a step of each."""
    with tempfile.TemporaryDirectory(dir=ROOT.parent) as folder:
        place, other = Path(folder, "alone"), Path(folder, "proved")
        place.mkdir(), other.mkdir()
        alone = took([*launcher, *SCRIPT, "--steps", str(STEPS)], place)
        verb = [sys.executable, "-m", "holdfast", "prove", "--keep", "--seed", "0", "--"]
        proof = took([*verb, *launcher, *SCRIPT], other)
        (whole,) = other.glob("holdfast-prove-*/1/cwd/log")
        return {
            "alone": alone, "proof": proof, "step": step_s(place / "log"), "seen": step_s(whole),
        }  # fmt: skip


def main() -> None:
    p = reporting(__doc__)
    p.add_argument("--rounds", type=int, default=3)
    args = p.parse_args()
    started, rows, found = time.time(), [], {}
    for layout, launcher in LAYOUTS.items():
        found[layout] = times = [measure(launcher) for _ in range(args.rounds)]
        of = {name: [one[name] for one in times] for name in times[0]}
        rows.append(
            row(
                f"all, less 15 s, {layout}",
                f"{median(of['proof']):.1f} s",
                f"training {median(of['alone']):.1f} s",
                median((p - 15) / a for p, a in zip(of["proof"], of["alone"])),
            )
        )
        rows.append(
            row(
                f"a step, {layout}",
                f"{median(of['seen']) * 1e3:.1f} ms",
                f"alone {median(of['step']) * 1e3:.1f} ms",
                median(b / a for a, b in zip(of["step"], of["seen"])),
            )
        )
    report(CLAIMS, __doc__, args, found, rows, started)


if __name__ == "__main__":
    main()
