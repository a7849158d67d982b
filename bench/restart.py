"""The cluster has changed: from what DeepSpeed saved to a loaded engine on another number of ranks.

A checkpoint of 2 ranks is to continue on 1, at the same ZeRO stage (DeepSpeed's converter makes no files
for stage 3 out of stage 1).  DeepSpeed's way: `ds_to_universal`, then `load_checkpoint` with
`load_universal`.  Ours: `holdfast.load` straight from DeepSpeed's files into the live engine.  Both then do
the same first step; starting processes and building the engine is the same for both and left out.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import HERE, RESULTS, ratio, report, row, seconds, take_turns
from convert import make
from files import files_below, warm
from watching import watch

CLI = "from holdfast.cli.main import main; main()"
ENV = {"DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}


def started(option: str, url: Path, stage: int, width: int, layers: int) -> float:
    """Seconds of the load alone, into an engine on one rank that then does a step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command += [str(HERE / "zero_state.py"), "-", f"--{option}={url}", f"--stage={stage}"]
    seen = watch([*command, f"--width={width}", f"--layers={layers}"], env=ENV)
    return max(float(x) for x in re.findall(r"LOADED ([\d.]+)", seen.output))


class Restart:
    """One stage to restart at."""

    def __init__(self, source: Path, root: Path, stage: int, width: int, layers: int) -> None:
        self.source, self.root = source, root
        self.to = (stage, width, layers)
        self.parts: dict[str, list[float]] = {"convert": [], "load": []}

    def peer(self, _: int) -> float:
        out, tag = self.root / "ds", (self.source / "latest").read_text()
        command = [
            sys.executable,
            "-m",
            "deepspeed.checkpoint.ds_to_universal",
            "--inject_missing_state",
        ]
        command += ["--num_extract_workers=2", "--num_merge_workers=2"]
        command += ["--input_folder", str(self.source / tag), "--output_folder", str(out / "u")]
        converted = watch(command, env=ENV).seconds
        (out / "latest_universal").write_text("u")
        loaded = started("load", out, *self.to)
        shutil.rmtree(out)
        self.parts["convert"].append(converted)
        self.parts["load"].append(loaded)
        return converted + loaded

    def ours(self, _: int) -> float:
        return started("holdfast", self.source, *self.to)

    def copy(self, _: int) -> float:
        """From a copy in holdfast's format, made once: what a materialised checkpoint would gain."""
        out = self.root / "copy"
        if not out.exists():
            command = [sys.executable, "-c", CLI, "convert", str(self.source), str(out)]
            self.parts["copy"] = [watch(command, env=ENV).seconds]
            warm(files_below(out))
        return started("holdfast", out, *self.to)


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    for what, f in found.items():
        peer = f"ds_to_universal + load_universal {seconds(f['seconds'], 'ds')}"
        out.append(
            row(f"restart {what}", seconds(f["seconds"], "holdfast", f["bytes"]), peer,
                ratio(f["seconds"], "ds", "holdfast"), ">= 20")
        )  # fmt: skip
        copy = f"a converted copy {seconds(f['seconds'], 'copy')}, made in {f['parts']['copy'][0]:.1f} s"
        out.append(
            row(f"restart {what}, in place", seconds(f["seconds"], "holdfast"), copy,
                ratio(f["seconds"], "copy", "holdfast"), "")
        )  # fmt: skip
    return out


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--root", help="a directory on the disk to be measured")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--width", type=int, default=768)
    p.add_argument("--layers", type=int, default=12)
    p.add_argument("--small", action="store_true", help="a tenth, to try the script out")
    p.add_argument("--out", type=Path, default=RESULTS)
    args = p.parse_args()
    width, layers = (256, 4) if args.small else (args.width, args.layers)
    root = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=args.root or HERE.parent.parent))
    began, found = time.time(), {}
    try:
        for stage in (1, 3):
            source = make(root / "source", stage, width, layers)
            warm(files_below(source))
            restart = Restart(source, root, stage, width, layers)
            turns = take_turns(
                {"ds": restart.peer, "holdfast": restart.ours, "copy": restart.copy}, args.rounds
            )
            size = sum(f.stat().st_size for f in files_below(source) if "optim" in f.name)
            found[f"at ZeRO-{stage}, 2 ranks to 1"] = {
                "seconds": turns,
                "parts": restart.parts,
                "bytes": size,
            }
            shutil.rmtree(source)
            shutil.rmtree(root / "copy")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    report("restart", __doc__, args, found, rows(found), began)


if __name__ == "__main__":
    main()
